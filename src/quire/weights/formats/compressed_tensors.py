"""compressed-tensors: each module says by its tensors how it is stored.

    weight_packed int32 [N, K * bits / 32]   codes of a row one behind the other, half of their range added
    weight_shape  int64 [2]
    weight_scale  [N, groups] or [1]
    weight_zero_point  int32 [N * bits / 32, groups], packed along the outputs, or int8; where not symmetric
    weight_g_idx  int32 [K]                  act-order: the group of each input

    weight int8 [N, K] with weight_scale [N, 1] or [1], and weight_zero_point where not symmetric
    weight e4m3 [N, K] with weight_scale [N, 1], [1] or by blocks

    w = scale * (code - zero)

Scales of activations and of the KV cache are not needed: the first are found for each token, and the cache has its
own."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StoredTensor
from quire.weights.bits import num_words, unpack
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import MadeTensor, modules_with, parts_of
from quire.weights.formats.fp8 import DEFAULT_BLOCK, block_size, float8
from quire.weights.formats.grouped import grouped_integers, groups_of_inputs
from quire.weights.raw import RawTensors

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
NOT_NEEDED = (".input_scale", ".input_zero_point", ".weight_zero_point", ".weight_g_idx")


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, MadeTensor]:
    quantization.expect("format", *FORMATS)
    sizes = _num_bits(quantization)
    made = {}
    for module in modules_with(raw, ".weight_packed"):
        made[f"{module}.weight"] = _packed(raw, module, sizes)
    for module in modules_with(raw, ".weight_scale"):
        if f"{module}.weight" in raw:
            float_codes = raw.dtype(f"{module}.weight") == "F8_E4M3"
            made[f"{module}.weight"] = (
                float8(raw, module, ".weight_scale", _block(quantization)) if float_codes else _bytes(raw, module)
            )
    return made


def _num_bits(quantization: CheckpointConfig) -> list[int]:
    groups = quantization.section("config_groups")
    schemes = [groups.section(name) for name in quantization.dict("config_groups", {})]
    return [scheme.section("weights").int("num_bits", 8) for scheme in schemes]


def _block(quantization: CheckpointConfig) -> tuple[int, int]:
    groups = quantization.section("config_groups")
    schemes = [groups.section(name).section("weights") for name in quantization.dict("config_groups", {})]
    return next((block_size(s, "block_structure") for s in schemes if "block_structure" in s), DEFAULT_BLOCK)


def _packed(raw: RawTensors, module: str, sizes: list[int]) -> MadeTensor:
    """Bits follow from the shapes; the configuration must know them too."""
    name = f"{module}.weight_packed"
    raw.expect_shape(f"{module}.weight_shape", 2)
    outputs, inputs = (int(size) for size in raw.integers(f"{module}.weight_shape"))
    found = raw.shape(name)
    bits = next((bits for bits in sizes if found == (outputs, num_words(inputs, bits))), 0)
    if not 1 <= bits <= 8:
        raise raw.bad(name, f"is {[*found]}, which is not {[outputs, inputs]} in {sizes} bits")
    groups = raw.shape(f"{module}.weight_scale")[-1]
    if inputs % groups or raw.shape(f"{module}.weight_scale") not in ((outputs, groups), (1,)):
        raise raw.bad(f"{module}.weight_scale", f"is {[*raw.shape(f'{module}.weight_scale')]} for {[outputs, inputs]}")
    parts = parts_of(raw, module, (".weight_packed", ".weight_shape", ".weight_scale", *NOT_NEEDED))
    return MadeTensor((outputs, inputs), parts, partial(_make_packed, raw, module, (outputs, inputs), bits))


def _make_packed(raw: RawTensors, module: str, shape: tuple[int, int], bits: int) -> StoredTensor:
    name, (outputs, inputs) = f"{module}.weight", shape
    words = raw.integers(f"{module}.weight_packed")
    scales, zeros = _scales_and_zeros(raw, module, outputs, bits)
    groups = groups_of_inputs(raw, f"{module}.weight_g_idx", inputs, scales.shape[1])

    def codes(first: int, last: int) -> NDArray[np.uint8]:
        return unpack(words[first:last], bits, inputs)

    return grouped_integers(name, shape, bits, codes, scales, zeros + (1 << (bits - 1)), groups)


def _scales_and_zeros(
    raw: RawTensors, module: str, outputs: int, bits: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[N, groups] each; zeros are of signed codes."""
    scales = raw.floats(f"{module}.weight_scale")
    scales = np.ascontiguousarray(np.broadcast_to(scales.reshape(-1, scales.shape[-1]), (outputs, scales.shape[-1])))
    if (name := f"{module}.weight_zero_point") not in raw:
        return scales, np.zeros_like(scales)
    stored, groups = raw.integers(name), scales.shape[1]
    if raw.dtype(name) == "I32":
        raw.expect_shape(name, num_words(outputs, bits), groups)
        zeros = unpack(stored.T, bits, outputs).T.astype(np.float32) - (1 << (bits - 1))
    else:
        zeros = stored.astype(np.float32).reshape(-1, stored.shape[-1])
    if zeros.shape not in ((outputs, groups), (1, groups)):
        raise raw.bad(name, f"is {[*stored.shape]}, for scales of {[outputs, groups]}")
    return scales, np.ascontiguousarray(np.broadcast_to(zeros, scales.shape))


def _bytes(raw: RawTensors, module: str) -> MadeTensor:
    name = f"{module}.weight"
    if len(shape := raw.shape(name)) != 2 or raw.dtype(name) != "I8":
        raise raw.bad(name, f"is {raw.dtype(name)} {[*shape]}, and a matrix of I8 is expected")
    outputs, inputs = shape
    scales = raw.shape(f"{module}.weight_scale")
    if scales not in ((1,), (1, 1), (outputs,), (outputs, 1)) and (len(scales) != 2 or inputs % scales[1]):
        raise raw.bad(f"{module}.weight_scale", f"is {[*scales]} for {[*shape]}")
    parts = parts_of(raw, module, (".weight", ".weight_scale", *NOT_NEEDED))
    return MadeTensor((outputs, inputs), parts, partial(_make_bytes, raw, module, (outputs, inputs)))


def _make_bytes(raw: RawTensors, module: str, shape: tuple[int, int]) -> StoredTensor:
    name = f"{module}.weight"
    stored = raw.integers(name)
    scales, zeros = _scales_and_zeros(raw, module, shape[0], 8)

    def codes(first: int, last: int) -> NDArray[np.uint8]:
        return np.bitwise_xor(stored[first:last].view(np.uint8), 128, dtype=np.uint8)

    return grouped_integers(name, shape, 8, codes, scales, zeros + 128)
