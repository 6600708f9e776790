"""Floats in small groups with 8-bit scales, as compressed-tensors has them, besides MXFP4 (mxfp4.py).

    NVFP4  weight_packed uint8 [N, K / 2], two e2m1 values a byte, the first in the low nibble
           weight_scale e4m3 [N, K / 16], weight_global_scale fp32 [1]       w = q * weight_scale / weight_global_scale
    MXFP8  weight e4m3 [N, K], weight_scale uint8 [N, K / 32], exponents plus 127

The products of NVFP4 are kept as fp16, which no block layout of 32 weights holds in less; scales that are static, of
activations, are not needed."""

import numpy as np
from numpy.typing import NDArray

from quire.ops.dequantize import E2M1_VALUES
from quire.ops.tensors import F16, StoredTensor
from quire.weights.blocks import fp8_blocks
from quire.weights.formats.derived_tensor import DerivedTensor, module_tensors, plain_floats
from quire.weights.raw import RawTensors

MX_GROUP, NV_GROUP = 32, 16
CHUNK_WEIGHTS = 1 << 20  # unpacked at once
MAX_FP16 = 65504
NVFP4_TENSORS = (".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale")


def nvfp4(raw: RawTensors, module: str) -> DerivedTensor:
    packed, scales, whole = (f"{module}.{part}" for part in ("weight_packed", "weight_scale", "weight_global_scale"))
    if len(shape := raw.shape(packed)) != 2 or shape[1] * 2 % NV_GROUP or raw.dtype(packed) != "U8":
        raise raw.bad(packed, f"is {raw.dtype(packed)} {[*shape]}, and NVFP4 has pairs of U8 for groups of {NV_GROUP}")
    outputs, inputs = shape[0], shape[1] * 2
    raw.expect_shape(scales, outputs, inputs // NV_GROUP)
    if raw.dtype(scales) != "F8_E4M3":
        raise raw.bad(scales, f"is {raw.dtype(scales)}, and NVFP4 has scales of F8_E4M3")
    if raw.shape(whole) not in ((), (1,)):
        raise raw.bad(whole, f"is {[*raw.shape(whole)]}, and one number is expected")

    def derive() -> StoredTensor:
        number = np.float32(raw.floats(whole).reshape(-1)[0])
        if not np.isfinite(number) or number <= 0:
            raise raw.bad(whole, f"is {number}, and scales are divided by it")
        pairs, by_group = raw.integers(packed), raw.floats(scales).reshape(outputs, -1) / (2 * number)
        fits = bool(np.abs(by_group).max(initial=0) * np.abs(E2M1_VALUES).max() <= MAX_FP16)
        values = np.empty((outputs, inputs), np.float16 if fits else np.float32)
        step = max(CHUNK_WEIGHTS // inputs, 1)
        for first in range(0, outputs, step):
            rows = slice(first, first + step)
            q = E2M1_VALUES[np.stack((pairs[rows] & 15, pairs[rows] >> 4), axis=-1).astype(np.intp)]
            values[rows] = (q.reshape(len(q), -1, NV_GROUP) * by_group[rows, :, None]).reshape(len(q), -1)
        name = f"{module}.weight"
        return StoredTensor(name, (outputs, inputs), F16, values.view(np.uint8)) if fits else plain_floats(name, values)

    return DerivedTensor((outputs, inputs), module_tensors(raw, module, NVFP4_TENSORS), derive)


def mxfp8(raw: RawTensors, module: str) -> DerivedTensor:
    name, exponents = f"{module}.weight", f"{module}.weight_scale"
    if len(shape := raw.shape(name)) != 2 or shape[1] % MX_GROUP:
        raise raw.bad(name, f"is {[*shape]}, and MXFP8 has groups of {MX_GROUP}")
    outputs, inputs = shape
    raw.expect_shape(exponents, outputs, inputs // MX_GROUP)

    def derive() -> StoredTensor:
        scales = np.ldexp(np.float32(1), raw.integers(exponents).astype(np.int32) - 127)
        stored = raw.tensor(name).data

        def quantized(first: int, last: int) -> NDArray[np.uint8]:
            return stored[first:last]

        return fp8_blocks(name, (outputs, inputs), quantized, scales)

    return DerivedTensor((outputs, inputs), module_tensors(raw, module, (".weight", ".weight_scale")), derive)
