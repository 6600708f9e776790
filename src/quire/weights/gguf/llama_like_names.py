"""Rows of names.py for architectures that are Llama, or Llama with experts, but for a few names."""

from collections.abc import Mapping

from quire.weights.gguf import derived_config
from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant
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
    SIGMOID,
    like_llama,
)

UNGATED_LAYER = {part: name for part, name in GATED_LAYER.items() if part != "ffn_gate"}
ERNIE_CORRECTION = "mlp.moe_statics.e_score_correction_bias"

LFM2_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}
LFM2_LAYER = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}

HUNYUAN = like_llama(
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    layer_tensors={"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
    biases={"attention_bias": "attn_q"},
)

LLAMA_LIKE_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "mistral3": like_llama(  # Mistral Small 3.1 and 3.2; with a temperature, Ministral 3
        "MistralForCausalLM",
        "mistral",
        keys={
            "temperature_scale": "attention.temperature_scale",
            "yarn_log_multiplier": "rope.scaling.yarn_log_multiplier",
        },
        interleaved=INTERLEAVED_QK,
        derive=derived_config.mistral,
    ),
    "lfm2": GGUFArchitecture(
        name="Lfm2ForCausalLM",
        keys={**DECODER_KEYS, "conv_L_cache": "shortconv.l_cache"},
        constants={"model_type": "lfm2", "hidden_act": "silu", "block_auto_adjust_ff_dim": False},
        tensors=LFM2_TENSORS,
        layer_tensors=LFM2_LAYER,
        derive=derived_config.lfm2,
    ),
    "lfm2moe": GGUFArchitecture(
        name="Lfm2MoeForCausalLM",
        keys={
            **DECODER_KEYS,
            **EXPERT_KEYS,
            "num_experts": "expert_count",
            "num_dense_layers": "leading_dense_block_count",
            "conv_L_cache": "shortconv.l_cache",
        },
        constants={"model_type": "lfm2_moe", "hidden_act": "silu", "norm_topk_prob": True},
        tensors=LFM2_TENSORS,
        layer_tensors={
            **LFM2_LAYER,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
            "exp_probs_b": "feed_forward.expert_bias",
        },
        expects={"expert_gating_func": SIGMOID},
        derive=derived_config.lfm2,
    ),
    "exaone": like_llama(  # EXAONE 3
        "LlamaForCausalLM", "llama"
    ),
    "arcee": GGUFArchitecture(
        name="ArceeForCausalLM",
        keys=DECODER_KEYS,
        constants={"model_type": "arcee", "hidden_act": "relu2"},
        tensors=OUTER_TENSORS,
        layer_tensors=UNGATED_LAYER,
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
    ),
    "nemotron": GGUFArchitecture(
        name="NemotronForCausalLM",
        keys={**DECODER_KEYS, "norm_eps": "attention.layer_norm_epsilon"},
        constants={"model_type": "nemotron", "hidden_act": "relu2"},
        tensors={**OUTER_TENSORS, "output_norm.bias": "model.norm.bias"},
        layer_tensors=UNGATED_LAYER,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
        norm_offset=1.0,
    ),
    "jais2": GGUFArchitecture(
        name="Jais2ForCausalLM",
        keys={**DECODER_KEYS, "layer_norm_eps": "attention.layer_norm_epsilon"},
        constants={"model_type": "jais2", "hidden_act": "relu2"},
        tensors={**OUTER_TENSORS, "output_norm.bias": "model.norm.bias"},
        layer_tensors=UNGATED_LAYER,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
    ),
    "apertus": GGUFArchitecture(
        name="ApertusForCausalLM",
        keys={**DECODER_KEYS, **{f"xielu.{part}": f"xielu.{part}" for part in ("alpha_p", "alpha_n", "beta")}},
        constants={"model_type": "apertus", "hidden_act": "xielu"},
        tensors=OUTER_TENSORS,
        layer_tensors={
            **UNGATED_LAYER,
            **HEAD_NORMS,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
        },
        biases={"attention_bias": "attn_q"},
    ),
    "baichuan": like_llama(  # the converter splits q, k and v
        "BaichuanForCausalLM", "baichuan", interleaved=INTERLEAVED_QK, derive=derived_config.baichuan
    ),
    "minicpm": like_llama(
        "MiniCPMForCausalLM",
        "minicpm",
        keys={"scale_emb": "embedding_scale", "residual_scale": "residual_scale", "logit_scale": "logit_scale"},
        constants={"scale_emb": 12.0},
        interleaved=INTERLEAVED_QK,
        derive=derived_config.minicpm,
    ),
    "chatglm": like_llama(  # GLM-4-9B; converted from ChatGLM's own checkpoints, with q, k and v in one tensor
        "GlmForCausalLM",
        "glm",
        layer_tensors={"ffn_up": "mlp.gate_up_proj"},
        biases={"attention_bias": "attn_q"},
        variants={
            "attn_qkv": GGUFVariant(
                layer_tensors={"attn_qkv": "self_attn.qkv_proj"}, biases={"attention_bias": "attn_qkv"}
            )
        },
    ),
    "hunyuan-dense": HUNYUAN,
    "maincoder": like_llama("MaincoderForCausalLM", "maincoder", layer_tensors=HEAD_NORMS),
    "refact": like_llama(  # the converter splits k and v, gate and up
        "GPTRefactForCausalLM", "gpt_refact"
    ),
    "dots1": like_llama(
        "Dots1ForCausalLM",
        "dots1",
        keys={**EXPERT_KEYS, **GLM_KEYS, "n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
        layer_tensors={**HEAD_NORMS, **EXPERTS, **SHARED_EXPERTS, "exp_probs_b": "mlp.gate.e_score_correction_bias"},
        biases={"attention_bias": "attn_q"},
        expects={"expert_gating_func": SIGMOID},
    ),
    "ernie4_5-moe": like_llama(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        keys={
            "num_local_experts": "expert_count",
            "moe_num_experts": "expert_count",
            "moe_k": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        layer_tensors={**EXPERTS, **SHARED_EXPERTS, "exp_probs_b": ERNIE_CORRECTION},
        one_row=(ERNIE_CORRECTION,),
    ),
    "minimax-m2": like_llama(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        keys=EXPERT_KEYS,
        layer_tensors={**HEAD_NORMS, **MIXTRAL_EXPERTS, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
        expects={"expert_gating_func": SIGMOID},
    ),
    "phimoe": like_llama(
        "PhimoeForCausalLM",
        "phimoe",
        keys=EXPERT_KEYS,
        constants={"attention_bias": True, "lm_head_bias": True},
        tensors={"output.bias": "lm_head.bias", "output_norm.bias": "model.norm.bias"},
        layer_tensors=MIXTRAL_EXPERTS,
    ),
}
