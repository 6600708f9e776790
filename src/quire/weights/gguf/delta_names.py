"""Rows of names.py for hybrids with gated delta nets.

The converter adds 1 to norms but that of a delta net's output, stores -exp(A_log) as `ssm_a`, and takes q, k and v of
Qwen3-Next out of their groups. In Qwen3.5, heads take the key heads in turn."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.weights.config import CheckpointConfig
from quire.weights.gguf.architecture import GGUFArchitecture
from quire.weights.gguf.deepseek_names import DEEPSEEK_KEYS, DEEPSEEK_LAYER, SPLIT_KV_B, mla_sizes
from quire.weights.gguf.derived_config import layer_count
from quire.weights.gguf.shared_names import (
    DECODER_KEYS,
    EXPERT_KEYS,
    EXPERTS,
    GATED_LAYER,
    HEAD_NORMS,
    MTP_TENSORS,
    NEXTN_TENSORS,
    OUTER_TENSORS,
    SHARED_EXPERT,
    SIGMOID,
)

DELTA_KEYS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "value_size": "ssm.inner_size",
    "full_attention_interval": "full_attention_interval",
    "num_nextn_predict_layers": "nextn_predict_layers",
}
DELTA_LAYER = {
    **{part: name for part, name in GATED_LAYER.items() if part != "ffn_norm"},
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A",
    "ssm_dt": "linear_attn.dt",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **NEXTN_TENSORS,
}
EXPERT_LAYER = {**EXPERTS, **SHARED_EXPERT}
CONSTANTS = {"hidden_act": "silu", "converted": True}


def delta_net(config: CheckpointConfig) -> dict[str, Any]:
    """The width of a value head."""
    heads = config.int("linear_num_value_heads")
    return {
        "linear_value_head_dim": config.int("value_size") // max(heads, 1),
        "num_hidden_layers": layer_count(config),
    }


def kimi_linear(config: CheckpointConfig) -> dict[str, Any]:
    """The number of key heads is listed for each layer: without any, it has a state."""
    listed = list(config.get("num_key_value_heads", ()))
    return mla_sizes(config) | {
        "layer_types": ["full_attention" if heads else "linear_attention" for heads in listed],
        "num_key_value_heads": config.int("num_attention_heads"),
        "linear_num_heads": config.int("num_attention_heads"),
    }


KIMI_LINEAR = GGUFArchitecture(
    name="KimiLinearForCausalLM",
    keys={
        **DEEPSEEK_KEYS,
        "num_key_value_heads": "attention.head_count_kv",
        "linear_head_dim": "kda.head_dim",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
    },
    constants={**CONSTANTS, "model_type": "kimi_linear", "norm_topk_prob": True},
    tensors=OUTER_TENSORS,
    layer_tensors={
        **DEEPSEEK_LAYER,
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
        **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
        "ssm_beta": "self_attn.b_proj",
        "ssm_a": "self_attn.A",
        "ssm_dt": "self_attn.dt_bias",
        "ssm_norm": "self_attn.o_norm",
    },
    derive=kimi_linear,
    variants={"attn_k_b": SPLIT_KV_B},
)


def bailing_hybrid(config: CheckpointConfig) -> dict[str, Any]:
    """The keys of Bailing's hybrids, as Kimi Linear's. Layers that predict further tokens are counted, too."""
    layers = layer_count(config)
    derived = kimi_linear(config)
    derived |= {"num_hidden_layers": layers, "layer_types": derived["layer_types"][:layers]}
    return derived | {key: list(config.get(key)) for key in LIMITS if key in config}


LIMITS = {
    "expert_swiglu_limit_list": "swiglu_clamp_exp",
    "share_expert_swiglu_limit_list": "swiglu_clamp_shexp",
}
BAILING_HYBRID = replace(
    KIMI_LINEAR,
    name="BailingHybridForCausalLM",
    keys={
        **KIMI_LINEAR.keys,
        **LIMITS,
        "kda_safe_gate": "kda.safe_gate",
        "kda_lower_bound": "kda.gate_lower_bound",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
    constants={**CONSTANTS, "model_type": "bailing_hybrid"},
    layer_tensors={
        **KIMI_LINEAR.layer_tensors,
        "ssm_f_a": "self_attn.f_proj",
        "ssm_g_a": "self_attn.g_proj",
        "attn_gate": "self_attn.g_proj",
        "layer_output_norm": "final_layernorm",
    },
    expects={"expert_gating_func": SIGMOID},
    derive=bailing_hybrid,
)

DELTA_ARCHITECTURES: Mapping[str, GGUFArchitecture] = {
    "kimi-linear": KIMI_LINEAR,
    "bailingmoe3": BAILING_HYBRID,
    "qwen3next": GGUFArchitecture(
        name="Qwen3NextForCausalLM",
        keys={**DECODER_KEYS, **EXPERT_KEYS, **DELTA_KEYS},
        constants={**CONSTANTS, "model_type": "qwen3_next"},
        tensors=OUTER_TENSORS,
        layer_tensors={**DELTA_LAYER, **EXPERT_LAYER},
        norm_offset=1.0,
        derive=delta_net,
        mtp_tensors=MTP_TENSORS,
    ),
    "qwen35": GGUFArchitecture(
        name="Qwen3_5ForCausalLM",
        keys={**DECODER_KEYS, **DELTA_KEYS},
        constants={**CONSTANTS, "model_type": "qwen3_5_text", "tiled_heads": True},
        tensors=OUTER_TENSORS,
        layer_tensors=DELTA_LAYER,
        norm_offset=1.0,
        derive=delta_net,
        mtp_tensors=MTP_TENSORS,
    ),
    "qwen35moe": GGUFArchitecture(
        name="Qwen3_5MoeForCausalLM",
        keys={**DECODER_KEYS, **EXPERT_KEYS, **DELTA_KEYS},
        constants={**CONSTANTS, "model_type": "qwen3_5_moe_text", "tiled_heads": True},
        tensors=OUTER_TENSORS,
        layer_tensors={**DELTA_LAYER, **EXPERT_LAYER},
        norm_offset=1.0,
        derive=delta_net,
        mtp_tensors=MTP_TENSORS,
    ),
}
