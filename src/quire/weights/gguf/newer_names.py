"""Rows of names.py for architectures of 2025 and 2026."""

from array import array
from collections.abc import Mapping
from math import isfinite
from typing import Any

from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture, GGUFVariant
from quire.weights.gguf.derived_config import layer_count, types_by_pattern, without_nextn
from quire.weights.gguf.shared_names import (
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    GATED_LAYER,
    GLM_KEYS,
    HEAD_NORMS,
    INTERLEAVED_QK,
    MTP_TENSORS,
    NEXTN_TENSORS,
    OUTER_TENSORS,
    PRE_AND_POST_NORMS,
    SHARED_EXPERTS,
    SIGMOID,
    like_llama,
)

LLAMA_4_CHUNK = 8192  # which files do not have
LLAMA_4_PLAIN = 128  # experts of Maverick, which has no norms of q and k
NEXTN_LAYER = {**NEXTN_TENSORS, "nextn.layer_output_norm": "nextn.layer_output_norm"}
GEMMA_LAYER = {
    **GATED_LAYER,
    **HEAD_NORMS,
    **PRE_AND_POST_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA_TENSORS = {
    **OUTER_TENSORS,
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
GEMMA_KEYS = {
    **DECODER_KEYS,
    "rope_local_base_freq": "rope.freq_base_swa",
    "final_logit_softcapping": "final_logit_softcapping",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "sliding_window_pattern": "attention.sliding_window_pattern",
}


def _llama4(config: CheckpointConfig) -> dict[str, Any]:
    has_chunks = config.get("sliding_window") is None  # 0 says that there are none
    return {
        "intermediate_size_mlp": config.int("intermediate_size"),
        "intermediate_size": config.int("moe_intermediate_size", config.int("intermediate_size")),
        "attention_chunk_size": LLAMA_4_CHUNK if has_chunks else None,
        "use_qk_norm": config.int("num_local_experts", 0) != LLAMA_4_PLAIN,
        "rotary_dim": None,
        "sliding_window": None,
    }


def _exaone_moe(config: CheckpointConfig) -> dict[str, Any]:
    layers = layer_count(config)
    kinds = types_by_pattern(config.get("sliding_window_pattern", 4), layers)
    return {"num_hidden_layers": layers, "layer_types": kinds[:layers]}


def _kinds(config: CheckpointConfig, default_period: int) -> list[str]:
    pattern = config.get("sliding_window_pattern", default_period)
    return types_by_pattern(pattern, config.int("num_hidden_layers"))


def _afmoe(config: CheckpointConfig) -> dict[str, Any]:
    return {"layer_types": _kinds(config, 4)}


def _gemma3n(config: CheckpointConfig) -> dict[str, Any]:
    """Files have the cutoffs of gates, in standard deviations, instead of the shares that they follow from."""
    cutoffs = list(config.get("activation_cutoffs", ()))
    return {
        "layer_types": _kinds(config, 5),
        "activation_cutoffs": [cutoff if isfinite(cutoff) else None for cutoff in cutoffs] or None,
        "vocab_size_per_layer_input": None,
    }


def _gemma4(config: CheckpointConfig) -> dict[str, Any]:
    kinds = _kinds(config, 6)
    derived: dict[str, Any] = {"layer_types": kinds, "global_head_dim": config.int("head_dim"), "rotary_dim": None}
    derived["head_dim"] = config.int("local_head_dim", config.int("head_dim"))
    if isinstance(listed := config.get("num_key_value_heads"), array):
        by_kind = dict(zip(kinds, listed, strict=False))
        derived["num_key_value_heads"] = by_kind.get("sliding_attention", max(listed))
        derived["num_global_key_value_heads"] = by_kind.get("full_attention")
        derived["attention_k_eq_v"] = True
    if isinstance(sizes := config.get("intermediate_size"), array):
        derived["intermediate_size"] = sizes[0]
        derived["use_double_wide_mlp"] = sizes[-1] == 2 * sizes[0]
    return derived


def _deci(config: CheckpointConfig) -> dict[str, Any]:
    """Files list the heads and the feed-forward size of each layer, 0 where it has none."""
    layers = config.int("num_hidden_layers")

    def listed(key: str) -> list[int]:
        return list(value) if isinstance(value := config.get(key), array) else [config.int(key)] * layers

    heads, keys, sizes = (listed(key) for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"))
    return {
        "num_attention_heads": max(heads, default=0),
        "num_key_value_heads": max(keys, default=0),
        "layer_key_heads": keys,
        "layer_sizes": sizes,
        "intermediate_size": max(sizes, default=0),
    }


def _mimo2(config: CheckpointConfig) -> dict[str, Any]:
    layers = layer_count(config)
    kinds = _kinds(config, 6)[:layers]
    derived: dict[str, Any] = {"num_hidden_layers": layers, "layer_types": kinds, "rotary_dim": None}
    if isinstance(listed := config.get("num_key_value_heads"), array):
        by_kind = dict(zip(kinds, listed, strict=False))
        few = by_kind.get("full_attention", min(listed))
        derived |= {"num_key_value_heads": few, "swa_num_key_value_heads": by_kind.get("sliding_attention", 2 * few)}
    return derived


NEWER_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "llama4": like_llama(
        "Llama4ForCausalLM",
        "llama4_text",
        keys={**EXPERT_KEYS, "interleave_moe_layer_step": "interleave_moe_layer_step"},
        layer_tensors={
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{part}_exps": f"feed_forward.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")},
            **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        derive=_llama4,
    ),
    "afmoe": like_llama(
        "AfmoeForCausalLM",
        "afmoe",
        keys={
            **EXPERT_KEYS,
            "num_experts": "expert_count",
            "num_shared_experts": "expert_shared_count",
            "num_dense_layers": "leading_dense_block_count",
            "route_scale": "expert_weights_scale",
            "sliding_window_pattern": "attention.sliding_window_pattern",
        },
        constants={"mup_enabled": True},
        layer_tensors={
            **HEAD_NORMS,
            **EXPERTS,
            **SHARED_EXPERTS,
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias",
        },
        derive=_afmoe,
    ),
    "exaone-moe": like_llama(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        keys={
            **EXPERT_KEYS,
            **GLM_KEYS,
            "num_experts": "expert_count",
            "num_shared_experts": "expert_shared_count",
            "sliding_window_pattern": "attention.sliding_window_pattern",
        },
        layer_tensors={
            **HEAD_NORMS,
            **EXPERTS,
            **SHARED_EXPERTS,
            **NEXTN_LAYER,
            "exp_probs_b": "mlp.e_score_correction_bias",
        },
        derive=_exaone_moe,
        mtp_tensors=MTP_TENSORS,
    ),
    "hunyuan-moe": like_llama(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        keys={
            **EXPERT_KEYS,
            "num_experts": "expert_count",
            "moe_topk": "expert_used_count",
            "num_shared_expert": "expert_shared_count",
        },
        layer_tensors={
            **EXPERTS,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
            "ffn_gate_inp": "mlp.gate.wg",
            **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        biases={"attention_bias": "attn_q"},
    ),
    "bailingmoe": like_llama(
        "BailingMoeForCausalLM",
        "bailing_moe",
        keys={
            **EXPERT_KEYS,
            "num_experts": "expert_count",
            "num_shared_experts": "expert_shared_count",
            "norm_topk_prob": "expert_weights_norm",
            "first_k_dense_replace": "leading_dense_block_count",
        },
        layer_tensors={**EXPERTS, **SHARED_EXPERTS},
        interleaved=INTERLEAVED_QK,
    ),
    "bailingmoe2": like_llama(
        "BailingMoeV2ForCausalLM",
        "bailing_moe_v2",
        keys={
            **EXPERT_KEYS,
            **GLM_KEYS,
            "num_experts": "expert_count",
            "num_shared_experts": "expert_shared_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        layer_tensors={
            **HEAD_NORMS,
            **EXPERTS,
            **SHARED_EXPERTS,
            **NEXTN_LAYER,
            "attn_qkv": "self_attn.qkv_proj",
            "exp_probs_b": "mlp.gate.expert_bias",
        },
        expects={"expert_gating_func": SIGMOID},
        derive=without_nextn,
    ),
    "deci": like_llama("DeciLMForCausalLM", "nemotron-nas", interleaved=INTERLEAVED_QK, derive=_deci),
    "pangu-embedded": like_llama("PanguEmbeddedForCausalLM", "PanguEmbedded", biases={"bias": "attn_q"}),
    "gemma3n": GGUFArchitecture(
        name="Gemma3nForCausalLM",
        keys={**GEMMA_KEYS, "altup_num_inputs": "altup.num_inputs", "activation_cutoffs": "activation_sparsity_scale"},
        constants={"model_type": "gemma3n_text", "stacked_streams": True},
        tensors={
            **GEMMA_TENSORS,
            "altup_proj.weight": "model.altup_projections.weight",
            "altup_unembd_proj.weight": "model.altup_unembed_projections.weight",
        },
        layer_tensors={
            **GEMMA_LAYER,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        derive=_gemma3n,
    ),
    "gemma4": GGUFArchitecture(
        name="Gemma4ForCausalLM",
        keys={
            **GEMMA_KEYS,
            "local_head_dim": "attention.key_length_swa",
            "num_local_experts": "expert_count",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        constants={"model_type": "gemma4_text"},
        tensors=GEMMA_TENSORS,
        layer_tensors={
            **GEMMA_LAYER,
            "layer_output_scale": "layer_scalar",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps": "experts.gate_up_proj",
            "ffn_down_exps": "experts.down_proj",
        },
        derive=_gemma4,
        variants={"ffn_gate_inp": GGUFVariant({"enable_moe_block": True})},
    ),
    "mimo2": like_llama(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        keys={
            **EXPERT_KEYS,
            **GLM_KEYS,
            "v_head_dim": "attention.value_length",
            "attention_value_scale": "attention.value_scale",
            "swa_rope_theta": "rope.freq_base_swa",
            "sliding_window_pattern": "attention.sliding_window_pattern",
        },
        layer_tensors={
            **EXPERTS,
            **NEXTN_LAYER,
            "attn_sinks": "self_attn.attention_sink_bias",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        derive=_mimo2,
    ),
}
