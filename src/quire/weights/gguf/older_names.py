"""Rows of names.py for families of 2023 and 2024."""

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
    INTERLEAVED_QK,
    OUTER_TENSORS,
    SHARED_EXPERTS,
)

FUSED_LAYER = {part: name for part, name in GATED_LAYER.items() if part not in ("attn_q", "attn_k", "attn_v")}
FUSED_LAYER |= {"attn_qkv": "self_attn.qkv_proj"}


def _minicpm3(config: CheckpointConfig) -> dict[str, Any]:
    """Files do not have the scales, which are those of the only model."""
    scales = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256}
    return {"qk_nope_head_dim": config.int("key_length") - config.int("qk_rope_head_dim"), **scales}


OLDER_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "xverse": GGUFArchitecture(
        name="LlamaForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "llama", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=GATED_LAYER,
        interleaved=INTERLEAVED_QK,
    ),
    "orion": GGUFArchitecture(
        name="OrionForCausalLM",
        keys={**DECODER_KEYS, "rms_norm_eps": "attention.layer_norm_epsilon"},
        constants={"model_type": "orion", "hidden_act": "silu"},
        tensors={**OUTER_TENSORS, "output_norm.bias": "model.norm.bias"},
        layer_tensors=GATED_LAYER,
    ),
    "qwen": GGUFArchitecture(  # feed_forward_length counts gate and up together, as Qwen's own configuration does
        name="QWenLMHeadModel",
        keys={**DECODER_KEYS, "seq_length": "context_length"},
        constants={"model_type": "qwen", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=FUSED_LAYER,
    ),
    "bitnet": GGUFArchitecture(
        name="BitNetForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "bitnet", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, "attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
    ),
    "deepseek": GGUFArchitecture(
        name="DeepseekForCausalLM",
        keys={**DECODER_KEYS, **EXPERT_KEYS, **GLM_KEYS},
        constants={"model_type": "deepseek", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **EXPERTS, **SHARED_EXPERTS},
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
    "minicpm3": GGUFArchitecture(
        name="MiniCPM3ForCausalLM",
        keys=DEEPSEEK_KEYS,
        constants={"model_type": "minicpm3", "hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors=DEEPSEEK_LAYER,
        derive=_minicpm3,
    ),
}
