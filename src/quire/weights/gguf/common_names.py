"""Rows of names.py for the families that are read most: Llama, Qwen, Gemma, GLM, Granite, OLMo, Phi, gpt-oss."""

from collections.abc import Mapping

from quire.weights.gguf import derived_config
from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant
from quire.weights.gguf.shared_names import (
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    GATED_LAYER,
    GEMMA_KEYS,
    GLM_KEYS,
    GRANITE_KEYS,
    HEAD_NORMS,
    INTERLEAVED_QK,
    MIXTRAL_EXPERTS,
    NEXTN_TENSORS,
    OUTER_TENSORS,
    PRE_AND_POST_NORMS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SIGMOID,
    like_llama,
)

# The rows of yes and no of the head.
QWEN3_RERANKER = GGUFVariant({"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "yes", "1": "no"}})
QWEN2 = like_llama("Qwen2ForCausalLM", "qwen2")
QWEN3 = like_llama(
    "Qwen3ForCausalLM",
    "qwen3",
    tensors={"cls.output.weight": "score.weight"},
    layer_tensors=HEAD_NORMS,
    biases={"attention_bias": "attn_q"},
    variants={"cls.output": QWEN3_RERANKER},
)
QWEN3_MOE = like_llama(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    keys=EXPERT_KEYS,
    constants={"norm_topk_prob": True},
    layer_tensors={**HEAD_NORMS, **EXPERTS},
    biases={"attention_bias": "attn_q"},
)

COMMON_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama": like_llama(  # and Mistral, SmolLM
        "LlamaForCausalLM",
        "llama",
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
    ),
    "llama with experts": like_llama(
        "MixtralForCausalLM", "mixtral", keys=EXPERT_KEYS, layer_tensors=MIXTRAL_EXPERTS, interleaved=INTERLEAVED_QK
    ),
    "qwen2": QWEN2,
    "qwen2vl": QWEN2,  # its text
    "qwen3": QWEN3,
    "qwen3vl": QWEN3,  # its text
    "qwen2moe": like_llama(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        keys=EXPERT_KEYS,
        constants={"norm_topk_prob": False},
        layer_tensors={**EXPERTS, **SHARED_EXPERT},
    ),
    "qwen3moe": QWEN3_MOE,
    "qwen3vlmoe": QWEN3_MOE,  # its text
    "olmo2": GGUFArchitecture(
        name="Olmo2ForCausalLM",
        keys={**DECODER_KEYS, "sliding_window_pattern": "attention.sliding_window_pattern"},
        constants={"hidden_act": "silu"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **HEAD_NORMS, **PRE_AND_POST_NORMS},
        biases={"attention_bias": "attn_q"},
        derive=derived_config.olmo,
    ),
    "glm4moe": like_llama(  # and Solar Open
        "Glm4MoeForCausalLM",
        "glm4_moe",
        keys={
            **EXPERT_KEYS,
            **GLM_KEYS,
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        constants={"first_k_dense_replace": 0},
        layer_tensors={
            **HEAD_NORMS,
            **EXPERTS,
            **SHARED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
            **NEXTN_TENSORS,
        },
        biases={"attention_bias": "attn_q"},
        expects={"expert_gating_func": SIGMOID},
        derive=derived_config.without_nextn,
        variants={"attn_q_norm": GGUFVariant(constants={"use_qk_norm": True})},
    ),
    "exaone4": like_llama(
        "Exaone4ForCausalLM",
        "exaone4",
        keys={"sliding_window_pattern": "attention.sliding_window_pattern"},
        layer_tensors={**HEAD_NORMS, **PRE_AND_POST_NORMS},
        derive=derived_config.exaone,
    ),
    "internlm2": like_llama(  # the converter splits q, k and v
        "LlamaForCausalLM", "llama", interleaved=INTERLEAVED_QK, biases={"attention_bias": "attn_q"}
    ),
    "glm4": like_llama(
        "Glm4ForCausalLM",
        "glm4",
        layer_tensors={
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        biases={"attention_bias": "attn_q"},
    ),
    "ernie4_5": like_llama("Ernie4_5ForCausalLM", "ernie4_5", biases={"use_bias": "attn_q"}),
    "seed_oss": like_llama(
        "SeedOssForCausalLM",
        "seed_oss",
        layer_tensors={"post_attention_norm": "post_attention_layernorm"},
        biases={"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_up"},
    ),
    "olmoe": like_llama(
        "OlmoeForCausalLM",
        "olmoe",
        keys=EXPERT_KEYS,
        constants={"norm_topk_prob": False},
        layer_tensors={**HEAD_NORMS, **EXPERTS},
        expects={"attention.clamp_kqv": None},
    ),
    "gpt-oss": like_llama(
        "GptOssForCausalLM",
        "gpt_oss",
        keys=EXPERT_KEYS,
        constants={"attention_bias": True},
        layer_tensors={
            **EXPERTS,
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        derive=derived_config.gpt_oss,
    ),
    "granite": like_llama(
        "GraniteForCausalLM",
        "granite",
        keys=GRANITE_KEYS,
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
        expects={"rope.scaling.finetuned": True},  # false stands for layers that do not rotate
    ),
    "granitemoe": like_llama(
        "GraniteMoeForCausalLM",
        "granitemoe",
        keys={**GRANITE_KEYS, **EXPERT_KEYS},
        layer_tensors={
            **MIXTRAL_EXPERTS,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_shexp": "shared_mlp.gate_proj",
            "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        interleaved=INTERLEAVED_QK,
        biases={"attention_bias": "attn_q"},
        expects={"rope.scaling.finetuned": True},
        variants={"ffn_gate_shexp": GGUFVariant({"architectures": ["GraniteMoeSharedForCausalLM"]})},
    ),
    "smollm3": like_llama(
        "SmolLM3ForCausalLM", "smollm3", constants={"no_rope_layer_interval": 4}, interleaved=INTERLEAVED_QK
    ),
    "phi3": like_llama(
        "Phi3ForCausalLM", "phi3", layer_tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "gemma": like_llama("GemmaForCausalLM", "gemma", constants={"hidden_act": "gelu_pytorch_tanh"}, norm_offset=1.0),
    "gemma2": GGUFArchitecture(
        name="Gemma2ForCausalLM",
        keys=GEMMA_KEYS,
        constants={"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 4096},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **PRE_AND_POST_NORMS},
        norm_offset=1.0,
        derive=derived_config.gemma,
    ),
    "gemma3": GGUFArchitecture(
        name="Gemma3ForCausalLM",
        keys=GEMMA_KEYS,
        constants={"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh"},
        tensors=OUTER_TENSORS,
        layer_tensors={**GATED_LAYER, **HEAD_NORMS, **PRE_AND_POST_NORMS},
        norm_offset=1.0,
        derive=derived_config.gemma,
    ),
}
