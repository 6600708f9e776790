"""Rows of names.py for families of 2023 and 2024, and others with tensors of their own names."""

from collections.abc import Mapping
from typing import Any

from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.deepseek_names import DEEPSEEK_KEYS, DEEPSEEK_LAYER
from quire.weights.gguf.shared_names import (
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    GATED_LAYER,
    GLM_KEYS,
    HEAD_NORMS,
    INTERLEAVED_QK,
    MIXTRAL_EXPERTS,
    OUTER_TENSORS,
    SHARED_EXPERTS,
    SOFTMAX,
    like_llama,
)

FUSED_LAYER = {part: name for part, name in GATED_LAYER.items() if part not in ("attn_q", "attn_k", "attn_v")}
FUSED_LAYER |= {"attn_qkv": "self_attn.qkv_proj"}


def _minicpm3(config: CheckpointConfig) -> dict[str, Any]:
    """Files do not have the scales, which are those of the only model."""
    scales = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
    return {"qk_nope_head_dim": config.int("key_length") - config.int("qk_rope_head_dim"), **scales}


OLDER_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "xverse": like_llama("LlamaForCausalLM", "llama", interleaved=INTERLEAVED_QK),
    "orion": like_llama(
        "OrionForCausalLM",
        "orion",
        keys={"rms_norm_eps": "attention.layer_norm_epsilon"},
        tensors={"output_norm.bias": "model.norm.bias"},
    ),
    "qwen": GGUFArchitecture(  # feed_forward_length counts gate and up together, as Qwen's own configuration does
        name="QWenLMHeadModel",
        keys={**DECODER_KEYS, "seq_length": "context_length"},
        constants={"model_type": "qwen", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=FUSED_LAYER,
    ),
    "bitnet": like_llama(
        "BitNetForCausalLM",
        "bitnet",
        layer_tensors={"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
    ),
    "deepseek": like_llama(
        "DeepseekForCausalLM",
        "deepseek",
        keys={**EXPERT_KEYS, **GLM_KEYS},
        layer_tensors={**EXPERTS, **SHARED_EXPERTS},
        interleaved=INTERLEAVED_QK,
        expects={"expert_weights_scale": 1.0},
    ),
    "dbrx": GGUFArchitecture(
        name="DbrxForCausalLM",
        keys={
            "n_layers": "block_count",
            "max_seq_len": "context_length",
            "d_model": "embedding_length",
            "n_heads": "attention.head_count",
            "num_attention_heads": "attention.head_count",
            "num_local_experts": "expert_count",
            "attn_config.kv_n_heads": "attention.head_count_kv",
            "attn_config.clip_qkv": "attention.clamp_kqv",
            "attn_config.rope_theta": "rope.freq_base",
            "ffn_config.ffn_hidden_size": "feed_forward_length",
            "ffn_config.moe_num_experts": "expert_count",
            "ffn_config.moe_top_k": "expert_used_count",
        },
        constants={"model_type": "dbrx", "ffn_config.moe_normalize_expert_weights": 1.0},
        tensors=OUTER_TENSORS,
        layer_tensors={
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "attn_output_norm": "post_attention_layernorm",
            "ffn_gate_inp": "ffn.router.layer",
            "ffn_gate_exps": "ffn.experts.{}.w1",
            "ffn_up_exps": "ffn.experts.{}.v1",
            "ffn_down_exps": "ffn.experts.{}.w2",
        },
    ),
    "deepseek2-ocr": like_llama(  # its text
        "DeepseekForCausalLM",
        "deepseek",
        keys={**EXPERT_KEYS, **GLM_KEYS},
        layer_tensors={**EXPERTS, **SHARED_EXPERTS},
        expects={"expert_weights_scale": 1.0, "expert_gating_func": SOFTMAX},
    ),
    "arctic": like_llama(
        "ArcticForCausalLM",
        "arctic",
        keys=EXPERT_KEYS,
        constants={"parallel_attn_mlp_res": True, "use_residual": True, "moe_layer_frequency": 1},
        layer_tensors={
            **MIXTRAL_EXPERTS,
            "ffn_norm": "residual_layernorm",
            "ffn_norm_exps": "post_attention_layernorm",
            "ffn_gate": "residual_mlp.w1",
            "ffn_up": "residual_mlp.w3",
            "ffn_down": "residual_mlp.w2",
        },
        interleaved=INTERLEAVED_QK,
    ),
    "codeshell": GGUFArchitecture(
        name="CodeShellForCausalLM",
        keys={**DECODER_KEYS, "layer_norm_epsilon": "attention.layer_norm_epsilon"},
        constants={"model_type": "codeshell", "hidden_act": "gelu_pytorch_tanh"},
        tensors={**OUTER_TENSORS, "output_norm.bias": "model.norm.bias"},
        layer_tensors={**FUSED_LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "plamo3": GGUFArchitecture(
        name="Plamo3ForCausalLM",
        keys={
            **DECODER_KEYS,
            "sliding_window_pattern": "attention.sliding_window_pattern",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        constants={"model_type": "plamo3", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={
            **FUSED_LAYER,
            **HEAD_NORMS,
            "attn_norm": "pre_mixer_norm",
            "post_attention_norm": "post_mixer_norm",
            "ffn_norm": "pre_mlp_norm",
            "post_ffw_norm": "post_mlp_norm",
            "ffn_up": "mlp.gate_up_proj",
        },
        norm_offset=1.0,
        norm_offsets={"post_attention_norm": 0.2, "post_ffw_norm": 5**-1.5},
    ),
    "minicpm3": GGUFArchitecture(
        name="MiniCPM3ForCausalLM",
        keys=DEEPSEEK_KEYS,
        constants={"model_type": "minicpm3", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=DEEPSEEK_LAYER,
        derive=_minicpm3,
    ),
}
