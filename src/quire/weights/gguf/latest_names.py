"""Rows of names.py for architectures of 2026, and for the text of models that read images."""

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.core.errors import Unsupported
from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.derived_config import layer_count, types_by_pattern
from quire.weights.gguf.llama_like_names import HUNYUAN
from quire.weights.gguf.newer_names import NEXTN_LAYER
from quire.weights.gguf.shared_names import (
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    GLM_KEYS,
    GRANITE_KEYS,
    HEAD_NORMS,
    INTERLEAVED_QK,
    MIXTRAL_EXPERTS,
    SHARED_EXPERTS,
    SIGMOID,
    SOFTMAX,
    like_llama,
)

PATTERN = {"sliding_window_pattern": "attention.sliding_window_pattern"}
WHERE_EXPERTS = {"expert_layers": "ffn_gate_inp"}


def layer_types(config: CheckpointConfig, layers: int) -> list[str] | None:
    """The kind of every layer, by the pattern of windows; None: there is no window."""
    if not config.int("sliding_window", 0):
        return None
    return types_by_pattern(config.get("sliding_window_pattern", 4), layers)[:layers]


def experts_where_stored(config: CheckpointConfig, layers: int) -> list[str]:
    return ["sparse" if layer in config.list("expert_layers") else "dense" for layer in range(layers)]


def _mellum(config: CheckpointConfig) -> dict[str, Any]:
    return {"layer_types": layer_types(config, config.int("num_hidden_layers"))}


def _cohere2_moe(config: CheckpointConfig) -> dict[str, Any]:
    layers, size = layer_count(config), config.int("intermediate_size")
    return {
        "num_hidden_layers": layers,
        "layer_types": layer_types(config, layers),
        "mlp_layer_types": experts_where_stored(config, layers),
        "prefix_dense_intermediate_size": size,
        "intermediate_size": config.int("moe_intermediate_size", size),
        "expert_selection_fn": "softmax" if config.get("gating") == SOFTMAX else "sigmoid",
    }


def _hy_v3(config: CheckpointConfig) -> dict[str, Any]:
    layers, size = layer_count(config), max(config.int("moe_intermediate_size"), 1)
    return {
        "num_hidden_layers": layers,
        "mlp_layer_types": experts_where_stored(config, layers),
        "num_shared_experts": config.int("shared_expert_intermediate_size", size) // size,
    }


def _hunyuan_vl(config: CheckpointConfig) -> dict[str, Any]:
    """A file has the base of the frequencies, and the NTK factor beside it."""
    alpha, width = config.float("rope_alpha", 0.0), config.int("head_dim")
    if not alpha or width < 4:
        return {}
    return {"rope_theta": config.float("rope_theta") * alpha ** (width / (width - 2))}


def _step35(config: CheckpointConfig) -> dict[str, Any]:
    """Counts of heads are lists. Layers with a window rotate all columns, the others half of them."""
    layers = config.int("num_hidden_layers")
    kinds = layer_types(config, layers) or ["full_attention"] * layers
    derived: dict[str, Any] = {
        "layer_types": kinds,
        "mlp_layer_types": experts_where_stored(config, layers),
        "rotary_dim": None,
        "partial_rotary_factor": 0.5,
        "rope_local_partial_rotary_factor": 1.0,
    }
    if isinstance(listed := config.get("num_attention_heads"), array):
        heads = dict(zip(kinds, listed, strict=False))
        full = heads.get("full_attention", max(listed, default=0))
        derived |= {"num_attention_heads": full, "num_sliding_attention_heads": heads.get("sliding_attention", full)}
    if isinstance(listed := config.get("num_key_value_heads"), array):
        if len(set(listed)) != 1:
            raise Unsupported(f"{config.source}: layers have {', '.join(map(str, sorted(set(listed))))} key heads")
        derived["num_key_value_heads"] = listed[0]
    limits = {key: [*config.get(key)] for key in ("swiglu_limits", "swiglu_limits_shared") if key in config}
    return derived | limits


def _laguna(config: CheckpointConfig) -> dict[str, Any]:
    """The number of query heads is listed for each layer. Without a pattern, the first of every four layers sees all
    positions."""
    layers = config.int("num_hidden_layers")
    kinds = ["full_attention"] * layers
    if config.int("sliding_window", 0):
        pattern = config.get("sliding_window_pattern", 4)
        flags = pattern if isinstance(pattern, array) else [layer % max(pattern, 1) for layer in range(layers)]
        kinds = ["sliding_attention" if local else "full_attention" for local in flags]
    width = max(config.int("head_dim"), 1)
    derived: dict[str, Any] = {
        "layer_types": kinds,
        "rotary_dim": None,
        "partial_rotary_factor": config.int("rotary_dim", width) / width,
        "rope_local_partial_rotary_factor": config.int("rotary_dim_swa", width) / width,
    }
    if isinstance(listed := config.get("num_attention_heads"), array):
        heads = {"num_attention_heads": max(listed, default=0), "num_attention_heads_per_layer": list(listed)}
        derived |= heads
    return derived


def _granite_swa(config: CheckpointConfig) -> dict[str, Any]:
    """A file has one theta, and a flag for each layer that rotates."""
    layers, theta = config.int("num_hidden_layers"), config.float("rope_theta", 10_000.0)
    rotated = config.get("rotated_layers") or [True] * layers
    return {
        "layer_types": layer_types(config, layers),
        "layer_rope_theta": [theta if rotates else 0.0 for rotates in rotated],
    }


GRANITE_SWA = like_llama(
    "GraniteSWAForCausalLM",
    "granite_swa",
    keys={**GRANITE_KEYS, **PATTERN, "rotated_layers": "attention.rope_pattern"},
    layer_tensors={"attn_sinks": "self_attn.sinks"},
    interleaved=INTERLEAVED_QK,
    biases={"attention_bias": "attn_q", "mlp_bias": "ffn_up"},
    derive=_granite_swa,
)


def _minimax_m3(config: CheckpointConfig) -> dict[str, Any]:
    size = config.int("intermediate_size")
    return {"shared_intermediate_size": config.int("num_shared_experts", 0) * size}


def _smallthinker(config: CheckpointConfig) -> dict[str, Any]:
    """With a window, the first of every four layers has none, and no rope."""
    window = config.int("sliding_window", 0)
    local = [int(not window or layer % 4 > 0) for layer in range(config.int("num_hidden_layers"))]
    softmax = config.get("gating") == SOFTMAX
    layouts = {"rope_layout": local, "sliding_window_layout": local if window else [0] * len(local)}
    return layouts | {"moe_primary_router_apply_softmax": softmax}


def _openelm(config: CheckpointConfig) -> dict[str, Any]:
    """Counts are listed for each layer."""
    named = {
        "num_query_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "ffn_sizes": "intermediate_size",
    }
    listed = {ours: config.get(key) for ours, key in named.items()}
    layers = config.int("num_hidden_layers")
    return {ours: [*counts] if isinstance(counts, array) else [counts] * layers for ours, counts in listed.items()}


LATEST_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "openelm": like_llama(
        "OpenELMForCausalLM",
        "openelm",
        layer_tensors={**HEAD_NORMS, "attn_qkv": "self_attn.qkv_proj"},
        derive=_openelm,
    ),
    "granite_swa": GRANITE_SWA,
    "granite_swa with experts": replace(
        GRANITE_SWA,
        name="GraniteMoeSWAForCausalLM",
        keys={
            **GRANITE_SWA.keys,
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
        layer_tensors={
            **GRANITE_SWA.layer_tensors,
            "ffn_gate_inp": "block_sparse_moe.router",
            "ffn_gate_up_exps": "block_sparse_moe.experts.gate_up_proj",
            "ffn_down_exps": "block_sparse_moe.experts.down_proj",
            "ffn_up_shexp": "shared_mlp.input_linear",  # with the gate
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        biases={"attention_bias": "attn_q"},
    ),
    "smallthinker": like_llama(
        "SmallThinkerForCausalLM",
        "smallthinker",
        keys={**EXPERT_KEYS, "intermediate_size": "expert_feed_forward_length", "gating": "expert_gating_func"},
        constants={"hidden_act": "relu"},
        layer_tensors={
            "ffn_gate_inp": "block_sparse_moe.primary_router",
            **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{part}" for part in ("gate", "up", "down")},
        },
        derive=_smallthinker,
    ),
    "minimax-m3": like_llama(
        "MiniMaxM3VLForCausalLM",
        "minimax_m3_vl_text",
        keys={
            **EXPERT_KEYS,
            "intermediate_size": "expert_feed_forward_length",
            "dense_intermediate_size": "feed_forward_length",
            "num_shared_experts": "expert_shared_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "first_k_dense_replace": "leading_dense_block_count",
            "sparse_attention_config.sparse_block_size": "attention.indexer.block_size",
            "sparse_attention_config.sparse_topk_blocks": "attention.indexer.top_k",
        },
        layer_tensors={
            **HEAD_NORMS,
            **MIXTRAL_EXPERTS,
            "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
            **{f"ffn_{part}_shexp": f"block_sparse_moe.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
            **{
                f"indexer.{part}_{kind}": f"self_attn.index_{part}_{kind}" for part in "qk" for kind in ("proj", "norm")
            },
        },
        expects={"expert_gating_func": SIGMOID},
        norm_offset=1.0,
        derive=_minimax_m3,
    ),
    "mellum": like_llama(
        "MellumForCausalLM",
        "mellum",
        keys={
            **EXPERT_KEYS,
            **PATTERN,
            "num_experts": "expert_count",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        layer_tensors={**HEAD_NORMS, **EXPERTS},
        derive=_mellum,
    ),
    "cohere2moe": like_llama(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        keys={
            **EXPERT_KEYS,
            **PATTERN,
            "num_experts": "expert_count",
            "num_shared_experts": "expert_shared_count",
            "norm_topk_prob": "expert_weights_norm",
            "layer_norm_eps": "attention.layer_norm_epsilon",
            "logit_scale": "logit_scale",
            "gating": "expert_gating_func",
            "num_nextn_predict_layers": "nextn_predict_layers",
        },
        layer_tensors={**EXPERTS, **SHARED_EXPERTS, **NEXTN_LAYER},
        expects={"expert_weights_scale": None},
        layers_with=WHERE_EXPERTS,
        derive=_cohere2_moe,
    ),
    "hy_v3": like_llama(
        "HYV3ForCausalLM",
        "hy_v3",
        keys={**EXPERT_KEYS, **GLM_KEYS, "num_experts": "expert_count"},
        layer_tensors={
            **HEAD_NORMS,
            **EXPERTS,
            **NEXTN_LAYER,
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias",
            **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        expects={"expert_gating_func": SIGMOID},
        layers_with=WHERE_EXPERTS,
        derive=_hy_v3,
    ),
    "step35": like_llama(
        "Step3p5ForCausalLM",
        "step3p5",
        keys={
            **EXPERT_KEYS,
            **PATTERN,
            "rope_local_base_freq": "rope.freq_base_swa",
            "moe_router_scaling_factor": "expert_weights_scale",
            "norm_expert_weight": "expert_weights_norm",
            "swiglu_limits": "swiglu_clamp_exp",
            "swiglu_limits_shared": "swiglu_clamp_shexp",
        },
        layer_tensors={
            **HEAD_NORMS,
            **EXPERTS,
            "ffn_gate_inp": "moe.gate",
            "exp_probs_b": "moe.router_bias",
            "attn_gate": "self_attn.g_proj",
            **{f"ffn_{part}_shexp": f"share_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        layers_with=WHERE_EXPERTS,
        norm_offset=1.0,
        derive=_step35,
    ),
    "laguna": like_llama(
        "LagunaForCausalLM",
        "laguna",
        keys={
            **EXPERT_KEYS,
            **PATTERN,
            "num_experts": "expert_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "moe_routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "rope_local_base_freq": "rope.freq_base_swa",
            "rotary_dim_swa": "rope.dimension_count_swa",
        },
        constants={"converted": True},
        layer_tensors={
            **HEAD_NORMS,
            **EXPERTS,
            "exp_probs_b": "mlp.experts.e_score_correction_bias",
            "attn_gate": "self_attn.g_proj",
            **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        expects={"expert_gating_func": SIGMOID},
        derive=_laguna,
    ),
    "nanbeige": like_llama(
        "NanbeigeForCausalLM",
        "nanbeige",
        keys={key: key for key in ("num_loops", "skip_loop_final_norm")},
        interleaved=INTERLEAVED_QK,
    ),
    "hunyuan_vl": replace(  # its text
        HUNYUAN, keys={**DECODER_KEYS, "rope_alpha": "rope.scaling.alpha"}, derive=_hunyuan_vl
    ),
    "paddleocr": like_llama(  # its text: ERNIE 4.5 with the rope of Llama
        "LlamaForCausalLM",
        "llama",
    ),
}
