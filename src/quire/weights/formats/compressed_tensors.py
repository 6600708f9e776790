"""compressed-tensors: the tensors of a module tell how it is stored.

    weight_packed int32 [N, K * bits / 32]   packed along a row, with 2^(bits - 1) added
    weight_shape  int64 [2]
    weight_scale  [N, groups] or [1]
    weight_zero_point  int32 [N * bits / 32, groups], packed along the outputs, or int8; where not symmetric
    weight_g_idx  int32 [K]                  act-order: the group of each input

    weight int8 [N, K] with weight_scale [N, groups] or [1], and weight_zero_point where not symmetric; 8 bits or less
    weight e4m3 [N, K] with weight_scale [N, 1], [1] or by blocks

    w = scale * (q - zero)

    weight_packed uint8 [N, K / 2] with weight_scale uint8 [N, K / 32]: MXFP4, as gpt-oss has it (mxfp4.py)
    NVFP4 and MXFP8: see microscaled.py

A scheme whose activations have 8 bits says so of its tensors (`StoredTensor.activations`). Static scales of activations
and of the KV cache are not needed: both are computed at run time."""

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StoredTensor
from quire.weights.bits import packed_words, unpack
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, modules_with
from quire.weights.formats.fp8 import DEFAULT_BLOCK, block_size, float8
from quire.weights.formats.grouped import grouped_integers, groups_of_inputs
from quire.weights.formats.microscaled import mxfp8, nvfp4
from quire.weights.formats.mxfp4 import BLOCK_BYTES as MXFP4_BYTES
from quire.weights.formats.mxfp4 import mxfp4_tensor
from quire.weights.raw import RawTensors

FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
    "nvfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
ACTIVATIONS = {"int8": "int8", "float8": "fp8"}  # by type and bits
NOT_NEEDED = (".input_scale", ".input_zero_point", ".weight_zero_point", ".weight_g_idx")


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    quantization.expect("format", *FORMATS)
    schemes = _schemes(quantization)
    derived = {
        f"{module}.weight": _nibbles_or_words(raw, module, quantization, schemes)
        for module in modules_with(raw, ".weight_packed")
    }
    for module in modules_with(raw, ".weight_scale"):
        if f"{module}.weight" in raw:
            derived[f"{module}.weight"] = _of_bytes(raw, module, quantization, schemes)
    return derived


def _nibbles_or_words(
    raw: RawTensors, module: str, quantization: CheckpointConfig, schemes: list[CheckpointConfig]
) -> DerivedTensor:
    if f"{module}.weight_global_scale" in raw:
        return nvfp4(raw, module)
    if raw.dtype(f"{module}.weight_packed") == "U8":
        return _mxfp4(raw, module)
    return _with_activations(_packed(raw, module, schemes), _activations(quantization, 4))


def _of_bytes(
    raw: RawTensors, module: str, quantization: CheckpointConfig, schemes: list[CheckpointConfig]
) -> DerivedTensor:
    if raw.dtype(f"{module}.weight") == "F8_E4M3":
        if raw.dtype(f"{module}.weight_scale") == "U8":
            return mxfp8(raw, module)
        return float8(raw, module, ".weight_scale", _block(schemes))
    bits = _bits_of_bytes(raw, module, schemes)
    return _with_activations(_bytes(raw, module, schemes, bits), _activations(quantization, bits))


def _bits_of_bytes(raw: RawTensors, module: str, schemes: list[CheckpointConfig]) -> int:
    """The bits of integers that take a byte each. Where schemes differ, the scales tell which is the module's."""
    possible = [(scheme.int("num_bits", 8), scheme.int("group_size", -1)) for scheme in schemes]
    shape, scales = raw.shape(f"{module}.weight"), raw.shape(f"{module}.weight_scale")
    groups = scales[1] if len(scales) == 2 else 1
    fitting = {bits for bits, size in possible if (groups == 1 if size <= 0 else shape[-1:] == (groups * size,))}
    return fitting.pop() if len(fitting) == 1 else 8


def _activations(quantization: CheckpointConfig, bits: int) -> str:
    """What the activations of weights of so many bits are quantized to; nothing where groups differ."""
    groups, kinds = quantization.section("config_groups"), set()
    for name in quantization.dict("config_groups", {}):
        if groups.section(name).section("weights").int("num_bits", 8) == bits:
            inputs = groups.section(name).dict("input_activations", {})
            kinds.add(ACTIVATIONS.get(f"{inputs.get('type')}{inputs.get('num_bits')}", ""))
    return kinds.pop() if len(kinds) == 1 else ""


def _with_activations(derived: DerivedTensor, activations: str) -> DerivedTensor:
    def derive() -> StoredTensor:
        return replace(derived.derive(), activations=activations)

    return replace(derived, derive=derive) if activations else derived


def _schemes(quantization: CheckpointConfig) -> list[CheckpointConfig]:
    """How weights are quantized, in each of `config_groups`."""
    groups = quantization.section("config_groups")
    return [groups.section(name).section("weights") for name in quantization.dict("config_groups", {})]


def _check_groups(
    raw: RawTensors, module: str, shape: tuple[int, int], bits: int, schemes: list[CheckpointConfig]
) -> None:
    """Raises where the scales are not those that a scheme of so many bits has for the weight: another number of groups
    would give wrong weights, and a group size that does not divide the inputs has no scales of its own."""
    (outputs, inputs), scales = shape, raw.shape(f"{module}.weight_scale")
    groups = scales[1] if len(scales) == 2 else 1
    possible = []
    for scheme in schemes:
        if scheme.int("num_bits", 8) == bits:
            size = scheme.int("group_size", -1)
            possible.append(size)
            if groups == 1 if size <= 0 else inputs == groups * size:
                return
    sizes = ", ".join(map(str, possible)) or "none"
    raise raw.bad(
        f"{module}.weight_scale", f"is {[*scales]} for {[outputs, inputs]} in {bits} bits, and group_size is {sizes}"
    )


def _block(schemes: list[CheckpointConfig]) -> tuple[int, int]:
    return next((block_size(s, "block_structure") for s in schemes if "block_structure" in s), DEFAULT_BLOCK)


def _packed(raw: RawTensors, module: str, schemes: list[CheckpointConfig]) -> DerivedTensor:
    """The shapes give the number of bits, which must be one of the configuration's."""
    name = f"{module}.weight_packed"
    raw.expect_shape(f"{module}.weight_shape", 2)
    outputs, inputs = (int(size) for size in raw.integers(f"{module}.weight_shape"))
    packed, sizes = raw.shape(name), [scheme.int("num_bits", 8) for scheme in schemes]
    bits = next((bits for bits in sizes if packed == (outputs, packed_words(inputs, bits))), 0)
    if not 1 <= bits <= 8:
        raise raw.bad(name, f"is {[*packed]}, which is not {[outputs, inputs]} in {sizes} bits")
    groups = raw.shape(f"{module}.weight_scale")[-1]
    if raw.shape(f"{module}.weight_scale") not in ((outputs, groups), (1,)):
        raise raw.bad(f"{module}.weight_scale", f"is {[*raw.shape(f'{module}.weight_scale')]} for {[outputs, inputs]}")
    _check_groups(raw, module, (outputs, inputs), bits, schemes)
    sources = module_tensors(raw, module, (".weight_packed", ".weight_shape", ".weight_scale", *NOT_NEEDED))
    return DerivedTensor((outputs, inputs), sources, partial(_derive_packed, raw, module, (outputs, inputs), bits))


def _mxfp4(raw: RawTensors, module: str) -> DerivedTensor:
    packed, scales = f"{module}.weight_packed", f"{module}.weight_scale"
    if len(shape := raw.shape(packed)) != 2 or shape[1] % MXFP4_BYTES or raw.dtype(scales) != "U8":
        raise raw.bad(packed, f"is {[*shape]} with scales of {raw.dtype(scales)}, and MXFP4 has bytes for 32 weights")
    outputs, groups = shape[0], shape[1] // MXFP4_BYTES
    raw.expect_shape(scales, outputs, groups)

    def derive() -> StoredTensor:
        pairs = raw.integers(packed).reshape(outputs, groups, MXFP4_BYTES)
        return mxfp4_tensor(f"{module}.weight", pairs, raw.integers(scales))

    return DerivedTensor((outputs, groups * 2 * MXFP4_BYTES), (packed, scales), derive)


def _derive_packed(raw: RawTensors, module: str, shape: tuple[int, int], bits: int) -> StoredTensor:
    name, (outputs, inputs) = f"{module}.weight", shape
    words = raw.integers(f"{module}.weight_packed")
    scales, zeros = _scales_and_zeros(raw, module, outputs, bits)
    groups = groups_of_inputs(raw, f"{module}.weight_g_idx", inputs, scales.shape[1])

    def quantized(first: int, last: int) -> NDArray[np.uint8]:
        return unpack(words[first:last], bits, inputs)

    return grouped_integers(name, shape, bits, quantized, scales, zeros + (1 << (bits - 1)), groups)


def _scales_and_zeros(
    raw: RawTensors, module: str, outputs: int, bits: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[N, groups] each; zero points of signed values."""
    scales = raw.floats(f"{module}.weight_scale")
    scales = np.ascontiguousarray(np.broadcast_to(scales.reshape(-1, scales.shape[-1]), (outputs, scales.shape[-1])))
    if (name := f"{module}.weight_zero_point") not in raw:
        return scales, np.zeros_like(scales)
    stored, groups = raw.integers(name), scales.shape[1]
    if raw.dtype(name) == "I32":
        raw.expect_shape(name, packed_words(outputs, bits), groups)
        zeros = unpack(stored.T, bits, outputs).T.astype(np.float32) - (1 << (bits - 1))
    else:
        zeros = stored.astype(np.float32).reshape(-1, stored.shape[-1])
    if zeros.shape not in ((outputs, groups), (1, groups)):
        raise raw.bad(name, f"is {[*stored.shape]}, for scales of {[outputs, groups]}")
    return scales, np.ascontiguousarray(np.broadcast_to(zeros, scales.shape))


def _bytes(raw: RawTensors, module: str, schemes: list[CheckpointConfig], bits: int) -> DerivedTensor:
    name = f"{module}.weight"
    if len(shape := raw.shape(name)) != 2 or raw.dtype(name) != "I8":
        raise raw.bad(name, f"is {raw.dtype(name)} {[*shape]}, and a matrix of I8 is expected")
    outputs, inputs = shape
    scales = raw.shape(f"{module}.weight_scale")
    if scales not in ((1,), (1, 1), (outputs,), (outputs, 1)) and (len(scales) != 2 or scales[0] != outputs):
        raise raw.bad(f"{module}.weight_scale", f"is {[*scales]} for {[*shape]}")
    _check_groups(raw, module, (outputs, inputs), bits, schemes)
    sources = module_tensors(raw, module, (".weight", ".weight_scale", *NOT_NEEDED))
    return DerivedTensor((outputs, inputs), sources, partial(_derive_bytes, raw, module, (outputs, inputs), bits))


def _derive_bytes(raw: RawTensors, module: str, shape: tuple[int, int], bits: int) -> StoredTensor:
    name, half = f"{module}.weight", 1 << (bits - 1)
    stored = raw.integers(name)
    scales, zeros = _scales_and_zeros(raw, module, shape[0], bits)

    def quantized(first: int, last: int) -> NDArray[np.uint8]:
        return stored[first:last].view(np.uint8) + np.uint8(half)

    return grouped_integers(name, shape, bits, quantized, scales, zeros + half)
