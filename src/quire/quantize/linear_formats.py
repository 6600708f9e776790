"""Formats of linear layers in Hugging Face's layout: the tensors of a layer, and what config.json says of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.quantize import bitsandbytes, float8
from quire.quantize.integers import (
    GroupedIntegers,
    IntegerGrid,
    awq_tensors,
    byte_tensors,
    gptq_tensors,
    packed_tensors,
    to_nearest,
)
from quire.quantize.search import Floats
from quire.weights.bits import packed_words

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # what follows the layer's name -> dtype and shape
Encoded = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class InputScale:
    """A tensor of one fp32 number that readers scale a layer's inputs with."""

    name: str
    of: Callable[[float], float]  # given the largest magnitude, which is not 0


@dataclass(frozen=True, slots=True)
class LinearFormat:
    """`config`: quantization_config of config.json, given the layers that are left as they are."""

    config: Callable[[list[str]], dict[str, Any]]
    shapes: Callable[[int, int], Shapes]
    encode: Callable[[Floats, Floats | None], Encoded]  # weights [outputs, inputs], importance [inputs]
    fits: Callable[[int, int], bool] = lambda outputs, inputs: True
    grid: IntegerGrid | None = None  # of integers, which GPTQ may choose
    store: Callable[[GroupedIntegers], Encoded] | None = None
    input_scale: InputScale | None = None  # of a layer's inputs, from the calibration
    fp8_by: str | None = None  # of fp8: what shares a scale
    # With the largest weight of all layers that readers stack with this one, and expect to share a scale.
    encode_stacked: Callable[[Floats, Floats | None, float], Encoded] | None = None


# -- integers ----------------------------------------------------------------------------------------------------------


def _of_integers(
    grid: IntegerGrid,
    store: Callable[[GroupedIntegers], Encoded],
    shapes: Callable[[int, int], Shapes],
    config: Callable[[list[str]], dict[str, Any]],
    multiple_of: int = 1,
) -> LinearFormat:
    def fits(outputs: int, inputs: int) -> bool:
        return inputs % grid.group_of(inputs) == 0 and outputs % multiple_of == 0 and inputs * grid.bits % 32 == 0

    return LinearFormat(config, shapes, lambda w, importance: store(to_nearest(w, grid, importance)), fits, grid, store)


def gptq(bits: int, group: int, symmetric: bool, second_version: bool, act_order: bool) -> LinearFormat:
    grid = IntegerGrid(bits, group, symmetric, min_zero=0 if second_version else 1)

    def shapes(outputs: int, inputs: int) -> Shapes:
        groups = inputs // grid.group_of(inputs)
        return {
            "qweight": ("I32", (packed_words(inputs, bits), outputs)),
            "qzeros": ("I32", (groups, packed_words(outputs, bits))),
            "scales": ("F16", (groups, outputs)),
            "g_idx": ("I32", (inputs,)),
        }

    def config(ignored: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group or -1,
            "sym": symmetric,
            "desc_act": act_order,
            "checkpoint_format": "gptq_v2" if second_version else "gptq",
            "lm_head": False,
        }

    return _of_integers(
        grid, lambda integers: gptq_tensors(integers, second_version=second_version), shapes, config, 32
    )


def awq(group: int) -> LinearFormat:
    grid = IntegerGrid(4, group, symmetric=False)

    def shapes(outputs: int, inputs: int) -> Shapes:
        groups = inputs // grid.group_of(inputs)
        return {
            "qweight": ("I32", (inputs, outputs // 8)),
            "qzeros": ("I32", (groups, outputs // 8)),
            "scales": ("F16", (groups, outputs)),
        }

    def config(ignored: list[str]) -> dict[str, Any]:
        settings = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
        return settings | {"modules_to_not_convert": [name for name in ignored if name != "lm_head"] or None}

    return _of_integers(grid, awq_tensors, shapes, config, 8)


def compressed(
    layout: str, weights: dict[str, Any], activations: dict[str, Any] | None, *, is_stated: bool = False
) -> Callable[[list[str]], dict[str, Any]]:
    """compressed-tensors' quantization_config. `is_stated`: the library would infer another layout, so it is told."""
    common = {"dynamic": False, "observer": "minmax", "observer_kwargs": {}, "actorder": None, "block_structure": None}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": common | weights, "input_activations": activations}
    if is_stated:
        group["format"] = layout

    def config(ignored: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "output_activations": None}},
            "ignore": ignored,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    return config


KV_SCHEME = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False, "group_size": None,
    "observer": "minmax", "observer_kwargs": {}, "actorder": None, "block_structure": None,
}  # fmt: skip
DYNAMIC_TOKENS = {"dynamic": True, "strategy": "token", "symmetric": True, "group_size": None, "observer": None}
INT8_TOKENS = {"num_bits": 8, "type": "int", **DYNAMIC_TOKENS}
FP8_TOKENS = {"num_bits": 8, "type": "float", **DYNAMIC_TOKENS}


def packed_integers(
    bits: int, group: int, symmetric: bool, act_order: bool, activations: dict[str, Any] | None = None
) -> LinearFormat:
    """W4A16, W8A16 and their like. `activations`: None where they stay as they are."""
    grid = IntegerGrid(bits, group, symmetric)

    def shapes(outputs: int, inputs: int) -> Shapes:
        groups = inputs // grid.group_of(inputs)
        tensors: Shapes = {
            "weight_packed": ("I32", (outputs, packed_words(inputs, bits))),
            "weight_scale": ("F16", (outputs, groups)),
            "weight_shape": ("I64", (2,)),
        }
        if not symmetric:
            tensors["weight_zero_point"] = ("I32", (packed_words(outputs, bits), groups))
        if act_order:
            tensors["weight_g_idx"] = ("I32", (inputs,))
        return tensors

    settings = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "actorder": "group" if act_order else None,
    }
    config = compressed("pack-quantized", settings, activations, is_stated=activations is not None)
    return _of_integers(grid, lambda integers: packed_tensors(integers, symmetric=symmetric), shapes, config)


def whole_bytes(bits: int, group: int) -> LinearFormat:
    """W8A8 and W4A8: integers a byte each, a scale for each output or group, and for each token at run time."""
    settings = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
    }
    grid = IntegerGrid(bits, group, symmetric=True)

    def shapes(outputs: int, inputs: int) -> Shapes:
        return {
            "weight": ("I8", (outputs, inputs)),
            "weight_scale": ("F16", (outputs, inputs // grid.group_of(inputs))),
        }

    return _of_integers(grid, byte_tensors, shapes, compressed("int-quantized", settings, INT8_TOKENS))


# -- fp8 and bitsandbytes ----------------------------------------------------------------------------------------------


def fp8(by: str, static_inputs: bool = False) -> LinearFormat:
    """`by`: what shares a scale, "tensor", "channel" or "block"."""
    settings = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": by, "group_size": None}
    activations: dict[str, Any] = {**FP8_TOKENS}
    if by == "block":
        settings["block_structure"] = [float8.BLOCK, float8.BLOCK]
        activations |= {"strategy": "group", "group_size": float8.BLOCK}
    if static_inputs:
        activations |= {"dynamic": False, "strategy": "tensor", "observer": "minmax"}
    encode = {"tensor": float8.by_tensor, "channel": float8.by_output, "block": float8.by_block}[by]

    def shapes(outputs: int, inputs: int) -> Shapes:
        blocks = (-(-outputs // float8.BLOCK), -(-inputs // float8.BLOCK))
        scales = {"tensor": (1,), "channel": (outputs, 1), "block": blocks}[by]
        tensors: Shapes = {"weight": ("F8_E4M3", (outputs, inputs)), "weight_scale": ("F32", scales)}
        return tensors | ({"input_scale": ("F32", (1,))} if static_inputs else {})

    def fits(outputs: int, inputs: int) -> bool:
        return by != "block" or inputs % float8.BLOCK == 0  # readers scale activations in whole blocks

    config = compressed("float-quantized", settings, activations)
    scale = InputScale("input_scale", lambda largest: largest / float(float8.LARGEST)) if static_inputs else None
    return LinearFormat(config, shapes, lambda w, importance: encode(w), fits, input_scale=scale, fp8_by=by)


def four_bit_floats(kind: str, nested: bool) -> LinearFormat:
    def config(ignored: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested,
            "bnb_4bit_compute_dtype": "float16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ignored,
        }

    return LinearFormat(
        config,
        lambda outputs, inputs: bitsandbytes.four_bit_shapes(outputs, inputs, kind, nested),
        lambda w, importance: bitsandbytes.four_bits(w, kind, nested),
    )


def llm_int8() -> LinearFormat:
    def config(ignored: list[str]) -> dict[str, Any]:
        return {
            "quant_method": "bitsandbytes",
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": ignored,
        }

    def shapes(outputs: int, inputs: int) -> Shapes:
        return {"weight": ("I8", (outputs, inputs)), "SCB": ("F32", (outputs,)), "weight_format": ("U8", ())}

    return LinearFormat(config, shapes, lambda w, importance: bitsandbytes.eight_bits(w))


def encoded_bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
