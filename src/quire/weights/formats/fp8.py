"""fp8 as DeepSeek, FBGEMM and AutoFP8 write it: w = scale * q, q e4m3.

    X.weight_scale_inv  fp32 [N / 128, K / 128], rounded up   blocks of weight_block_size; MiMo-V2.5 has several
                                                              matrices below each other, each rounded up by itself
    X.weight_scale      [N, 1] or [N]                          one for each output
    X.weight_scale      []                                     one for all
    X.scale             the first, as DeepSeek V4 writes it: powers of two (e8m0). Where X.weight is int8 [N, K / 2],
                        pairs of e2m1 values, it is [N, K / 32]: MXFP4

Static scales of activations (input_scale, input_scale_ub, activation_scale) are not needed: ours are computed for each
token."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.ops.tensors import StoredTensor
from quire.weights.blocks import BLOCK_SIZE, fits_blocks, fp8_blocks
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, modules_with, plain_floats
from quire.weights.formats.mxfp4 import BLOCK_BYTES as MXFP4_BYTES
from quire.weights.formats.mxfp4 import mxfp4_tensor
from quire.weights.raw import RawTensors

NOT_NEEDED = (".input_scale", ".input_scale_ub", ".activation_scale")
DEFAULT_BLOCK = (128, 128)
MAX_STACKED = 64  # matrices whose blocks are of their own


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    size = block_size(quantization, "weight_block_size")
    derived = {
        f"{module}.weight": float8(raw, module, suffix, size)
        for suffix in (".weight_scale_inv", ".weight_scale")
        for module in modules_with(raw, suffix)
    }
    for module in modules_with(raw, ".scale"):
        if (name := f"{module}.weight") in raw:
            is_packed = raw.dtype(name) in ("I8", "U8")
            derived[name] = float4(raw, module) if is_packed else float8(raw, module, ".scale", size)
    return derived


def float4(raw: RawTensors, module: str) -> DerivedTensor:
    name, exponents = f"{module}.weight", f"{module}.scale"
    if len(shape := raw.shape(name)) != 2 or shape[1] % MXFP4_BYTES:
        raise raw.bad(name, f"is {[*shape]}, and fp4 has rows of pairs in blocks of {2 * MXFP4_BYTES}")
    outputs, blocks = shape[0], shape[1] // MXFP4_BYTES
    raw.expect_shape(exponents, outputs, blocks)

    def derive() -> StoredTensor:
        pairs = raw.integers(name).view(np.uint8).reshape(outputs, blocks, MXFP4_BYTES)
        return mxfp4_tensor(name, pairs, raw.integers(exponents))

    return DerivedTensor((outputs, 2 * shape[1]), (name, exponents), derive)


def block_size(config: CheckpointConfig, key: str) -> tuple[int, int]:
    """Outputs and inputs that share a scale: [128, 128], or "128x128"."""
    value = config.get(key, list(DEFAULT_BLOCK))
    sizes = value.split("x") if isinstance(value, str) else value
    try:
        outputs, inputs = (int(size) for size in sizes)
    except (TypeError, ValueError):
        outputs = inputs = 0
    if outputs < 1 or inputs < 1:
        raise BadCheckpoint(f"{config.source}: {key} is {value!r}, not two sizes")
    return outputs, inputs


def float8(raw: RawTensors, module: str, suffix: str, block: tuple[int, int]) -> DerivedTensor:
    name = f"{module}.weight"
    if raw.dtype(name) != "F8_E4M3" or len(raw.shape(name)) != 2:
        raise raw.bad(name, f"is {raw.dtype(name)} {[*raw.shape(name)]}, and a matrix of F8_E4M3 is expected")
    outputs, inputs = raw.shape(name)
    scales = raw.shape(module + suffix)
    plain = scales in ((1,), (1, 1), (outputs,), (outputs, 1))
    if not plain and not num_stacked((outputs, inputs), scales, block):
        raise raw.bad(
            module + suffix,
            f"is {[*scales]}, neither one scale, nor one for each output, nor one for each {[*block]}",
        )
    sources = module_tensors(raw, module, (".weight", suffix, *NOT_NEEDED))
    return DerivedTensor((outputs, inputs), sources, partial(_derive, raw, name, module + suffix, block))


def num_stacked(shape: tuple[int, int], scales: tuple[int, ...], block: tuple[int, int]) -> int:
    """Of how many matrices below each other these are the scales by blocks; 0: they are not."""
    outputs, inputs = shape
    for count in range(1, MAX_STACKED + 1):
        rows = count * -(-(outputs // count) // block[0])
        if outputs % count == 0 and scales == (rows, -(-inputs // block[1])):
            return count
    return 0


def _scales(raw: RawTensors, name: str) -> NDArray[np.float32]:
    if raw.dtype(name) != "F8_E8M0":
        return raw.floats(name)
    return np.ldexp(np.float32(1), raw.integers(name).astype(np.int32) - 127)


def _derive(raw: RawTensors, name: str, scale_name: str, block: tuple[int, int]) -> StoredTensor:
    outputs, inputs = raw.shape(name)
    scales = _scales(raw, scale_name)
    by_blocks = scales.ndim == 2 and scales.shape not in ((1, 1), (outputs, 1))
    if by_blocks:
        count = num_stacked((outputs, inputs), scales.shape, block)
        rows = np.repeat(scales.reshape(count, -1, scales.shape[1]), block[0], axis=1)
        scales = rows[:, : outputs // count].reshape(outputs, -1)
    else:
        scales = np.broadcast_to(scales.reshape(-1, 1), (outputs, 1))
    if not fits_blocks(inputs, block[1] if by_blocks else inputs):
        by_input = np.repeat(scales, block[1], axis=1)[:, :inputs] if by_blocks else scales
        return plain_floats(name, raw.floats(name) * by_input)
    if by_blocks:  # the last block of a row may be shorter
        scales = np.repeat(scales, block[1] // BLOCK_SIZE, axis=1)[:, : inputs // BLOCK_SIZE]
    stored = raw.tensor(name).data

    def quantized(first: int, last: int) -> NDArray[np.uint8]:
        return stored[first:last]

    return fp8_blocks(name, (outputs, inputs), quantized, np.ascontiguousarray(scales))
