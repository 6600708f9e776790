"""BitNet: every weight is -1, 0 or 1, times one scale of the matrix.

    X.weight        uint8 [outputs / 4, inputs]     row r holds outputs r, r + n, r + 2n and r + 3n, n = outputs / 4,
                                                    two bits each from the lowest on: 0, 1, 2 for -1, 0, 1
    X.weight_scale  [1]                             w = q * scale (`autobitlinear`), or q / scale (`bitlinear`)

That is `offline`. With `online`, X.weight are the floats that were trained: the scale is their mean magnitude, and q is
the nearest of the three. transformers rounds activations to 8 bits first; here they stay as they are, or are rounded by
the kernels of quantized weights."""

from functools import partial
from math import frexp, ldexp

import numpy as np
from numpy.typing import NDArray

from quire.ops.dequantize import dequantize
from quire.ops.tensors import TQ2_0, StoredTensor
from quire.weights.blocks import fits_blocks, int4_blocks
from quire.weights.config import CheckpointConfig
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, modules_with, plain_floats
from quire.weights.raw import RawTensors

VALUES_A_BYTE = 4
MIN_SCALE = 1e-5  # of trained floats
Ternary = NDArray[np.uint8]  # 0, 1 and 2


def read(quantization: CheckpointConfig, raw: RawTensors) -> dict[str, DerivedTensor]:
    quantization.expect("use_rms_norm", False, None)
    if quantization.expect("quantization_mode", "offline", "online", None) == "online":
        modules = [name.removesuffix(".weight") for name in raw.names() if name.endswith("_proj.weight")]
        return {f"{module}.weight": _trained(raw, module) for module in modules}
    divides = quantization.expect("linear_class", "bitlinear", "autobitlinear", None) != "autobitlinear"
    return {f"{module}.weight": _packed(raw, module, divides) for module in modules_with(raw, ".weight_scale")}


def _packed(raw: RawTensors, module: str, divides: bool) -> DerivedTensor:
    name = f"{module}.weight"
    shape = raw.shape(name)
    if raw.dtype(name) != "U8" or len(shape) != 2:
        raise raw.bad(name, f"is {raw.dtype(name)} {[*shape]}, and a matrix of U8 is expected")
    raw.expect_shape(f"{module}.weight_scale", 1)
    outputs = VALUES_A_BYTE * shape[0]
    sources = module_tensors(raw, module, (".weight", ".weight_scale"))
    return DerivedTensor((outputs, shape[1]), sources, partial(_derive_packed, raw, module, divides))


def _derive_packed(raw: RawTensors, module: str, divides: bool) -> StoredTensor:
    stored = raw.integers(f"{module}.weight").view(np.uint8)
    quantized = np.concatenate([stored >> np.uint8(2 * i) & np.uint8(3) for i in range(VALUES_A_BYTE)])
    if quantized.max(initial=0) > 2:
        raise raw.bad(f"{module}.weight", "has a 3, and values are 0, 1 and 2")
    scale = float(raw.floats(f"{module}.weight_scale")[0])
    return ternary(f"{module}.weight", quantized, 1 / scale if divides else scale)


def _trained(raw: RawTensors, module: str) -> DerivedTensor:
    shape = raw.shape(f"{module}.weight")
    return DerivedTensor(shape, (f"{module}.weight",), partial(_derive_trained, raw, module))


def _derive_trained(raw: RawTensors, module: str) -> StoredTensor:
    tensor = raw.tensor(f"{module}.weight")
    weight = dequantize(tensor)
    scale = max(float(np.abs(weight).mean(dtype=np.float32)), MIN_SCALE)
    quantized = (np.clip(np.rint(weight / scale), -1, 1) + 1).astype(np.uint8)
    return ternary(tensor.name, quantized, _rounded(scale, raw.dtype(tensor.name)))


def _rounded(scale: float, dtype: str) -> float:
    """Rounded to the type of the weights, as transformers computes it."""
    if dtype == "BF16":
        mantissa, exponent = frexp(scale)
        return ldexp(round(mantissa * 256), exponent - 8)
    return float(np.float16(scale)) if dtype == "F16" else scale


def ternary(name: str, quantized: Ternary, scale: float) -> StoredTensor:
    """In 2 bits where rows are made of whole blocks and fp16 holds the scale, else in 4 bits, or in floats."""
    outputs, inputs = quantized.shape
    fp16_scale = np.float16(scale)
    if inputs % TQ2_0.block == 0 and float(fp16_scale) == np.float32(scale):
        runs = quantized.reshape(
            outputs, -1, 2, VALUES_A_BYTE, 32
        )  # weight 128 j + 32 l + m is bits 2 l of byte 32 j + m
        packed = sum(runs[:, :, :, i] << np.uint8(2 * i) for i in range(VALUES_A_BYTE))
        blocks = np.empty((outputs, inputs // TQ2_0.block, TQ2_0.block_bytes), np.uint8)
        blocks[:, :, :-2] = np.asarray(packed).reshape(outputs, -1, TQ2_0.block_bytes - 2)
        blocks[:, :, -2:] = fp16_scale.reshape(1).view(np.uint8)
        return StoredTensor(name, (outputs, inputs), TQ2_0, blocks.reshape(outputs, -1))
    if not fits_blocks(inputs, inputs):
        return plain_floats(name, np.float32(scale) * (quantized.astype(np.float32) - 1))
    scales, zeros = (np.full((outputs, 1), value, np.float32) for value in (scale, 8.0))
    return int4_blocks(name, (outputs, inputs), lambda first, last: quantized[first:last] + np.uint8(7), scales, zeros)
