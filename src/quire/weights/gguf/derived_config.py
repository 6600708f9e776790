"""Config keys that GGUF files do not have and that follow from others: a function for each architecture.

The rows of names.py name these functions."""

from array import array
from collections.abc import Iterable
from math import sqrt
from typing import Any

from quire.weights.config import CheckpointConfig


def gemma(config: CheckpointConfig) -> dict[str, Any]:
    """Gemma 2 and 3: the largest of each scales scores by hidden_size / heads instead of the width of a head; without a
    window, all layers have full attention."""
    largest = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}.get(config.architecture)  # layers
    heads, width = config.int("num_attention_heads"), config.int("head_dim")
    if config.int("num_hidden_layers") == largest:
        width = config.int("hidden_size") // max(heads, 1)
    derived: dict[str, Any] = {"query_pre_attn_scalar": width}
    pattern = config.get("sliding_window_pattern")  # a period, or a flag for each layer
    if not config.int("sliding_window", 0):
        derived["sliding_window_pattern"] = 1
    elif isinstance(pattern, array):
        derived["layer_types"] = _layer_types(pattern)
    return derived


def olmo(config: CheckpointConfig) -> dict[str, Any]:
    """OLMo 3 has the architecture name of OLMo 2, and a window."""
    if not config.int("sliding_window", 0):
        return {}
    pattern = config.get("sliding_window_pattern")
    kinds = {"layer_types": _layer_types(pattern)} if isinstance(pattern, array) else {}
    return {"architectures": ["Olmo3ForCausalLM"], **kinds}


def without_nextn(config: CheckpointConfig) -> dict[str, Any]:
    return {"num_hidden_layers": layer_count(config)}


def baichuan(config: CheckpointConfig) -> dict[str, Any]:
    """13B, which has ALiBi, is told by its number of layers."""
    if config.int("num_hidden_layers") != 40:
        return {}
    return {"max_position_embeddings": None, "model_max_length": config.int("max_position_embeddings")}


def minicpm(config: CheckpointConfig) -> dict[str, Any]:
    """The first files do not have the scales."""
    layers, hidden = config.int("num_hidden_layers"), config.int("hidden_size")
    depth = config.float("residual_scale", 0.0) * sqrt(layers)
    divisor = config.float("logit_scale", 0.0)
    return {"scale_depth": depth or 1.4, "dim_model_base": hidden / divisor if divisor else 256.0}


def mistral(config: CheckpointConfig) -> dict[str, Any]:
    """Ministral 3 has the architecture name of Mistral Small 3; its queries are scaled by position."""
    beta, mscale = config.float("temperature_scale", 0.0), config.float("yarn_log_multiplier", 0.0)
    scaling = config.dict("rope_scaling", default={})
    if mscale:
        scaling = {**scaling, "mscale": 1.0, "mscale_all_dim": mscale}
    if beta:
        scaling = {**scaling, "llama_4_scaling_beta": beta}
    named = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"} if beta else {}
    return {**named, "rope_scaling": scaling or None}


def exaone(config: CheckpointConfig) -> dict[str, Any]:
    pattern = config.get("sliding_window_pattern")
    if not config.int("sliding_window", 0):
        return {"layer_types": None}
    every = range(1, config.int("num_hidden_layers") + 1)
    return {"layer_types": _layer_types(pattern if isinstance(pattern, array) else (layer % 4 for layer in every))}


def lfm2(config: CheckpointConfig) -> dict[str, Any]:
    """The number of key heads is listed for each layer: without any, it is a convolution."""
    listed = config.get("num_key_value_heads")
    if not isinstance(listed, array):
        return {}
    kinds = ["full_attention" if heads else "conv" for heads in listed]
    return {"layer_types": kinds, "num_key_value_heads": max(listed, default=0)}


def gpt_oss(config: CheckpointConfig) -> dict[str, Any]:
    """Every other layer has a window. The ends of YaRN's ramp are not rounded to pairs, for which GGUF has no key."""
    layers = range(config.int("num_hidden_layers"))
    scaling = config.dict("rope_scaling", default={})
    return {
        "layer_types": _layer_types((layer + 1) % 2 for layer in layers),
        "rope_scaling": {**scaling, "truncate": False} if scaling else None,
    }


def layer_count(config: CheckpointConfig) -> int:
    """block_count includes the layers that predict further tokens."""
    return config.int("num_hidden_layers") - config.int("num_nextn_predict_layers", 0)


def types_by_pattern(pattern: Any, layers: int) -> list[str]:
    """`pattern` has a flag for each layer, or is the period of those without a window."""
    flags = pattern if isinstance(pattern, array) else [(layer + 1) % max(pattern, 1) for layer in range(layers)]
    return _layer_types(flags)


def _layer_types(pattern: Iterable[int]) -> list[str]:
    return ["sliding_attention" if local else "full_attention" for local in pattern]
