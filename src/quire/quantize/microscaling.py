"""Floats of 4 or 8 bits in small groups, whose scales are themselves floats of 8 bits: MXFP4, MXFP8 and NVFP4, as
compressed-tensors stores them.

    MXFP4  e2m1, groups of 32, a power of two for each
    MXFP8  e4m3, groups of 32, a power of two for each
    NVFP4  e2m1, groups of 16, an e4m3 scale for each, divided by one fp32 number for the layer"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.compiled import native
from quire.ops.dequantize import E2M1_VALUES, dequantize
from quire.ops.tensors import F8_E4M3, StoredTensor
from quire.quantize import float8
from quire.quantize.gguf_types import error_weights, mxfp4_values, nearest_entry
from quire.quantize.linear_formats import Encoded, InputScale, LinearFormat, Shapes, compressed
from quire.quantize.search import Floats, inverse
from quire.quantize.threads import CHUNK_WEIGHTS, in_threads

MX_GROUP, NV_GROUP = 32, 16
LARGEST_E2M1 = 6.0
LARGEST_NVFP4 = float(float8.LARGEST) * LARGEST_E2M1
BYTE, E4M3 = {"scale_dtype": "torch.uint8"}, {"scale_dtype": "torch.float8_e4m3fn"}
ASCENDING = np.sort(E2M1_VALUES)  # twice the floats
# What the largest weight of a group is moved to: 6 by the format's rule, 4 where the steps below 4 matter more.
NV_RANGES = np.arange(7, 14.1, 0.5, dtype=np.float32)


def _settings(bits: int, group: int, strategy: str, scale: dict[str, str]) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "symmetric": True, "strategy": strategy, "group_size": group, **scale}


def mxfp4(quantizes_inputs: bool = False) -> LinearFormat:
    """`quantizes_inputs`: readers quantize activations in the same way, as they come."""
    settings = _settings(4, MX_GROUP, "group", BYTE)
    config = compressed("mxfp4-pack-quantized", settings, {**settings, "dynamic": True} if quantizes_inputs else None)

    def shapes(outputs: int, inputs: int) -> Shapes:
        packed: Shapes = {"weight_packed": ("U8", (outputs, inputs // 2))}
        return packed | {"weight_scale": ("U8", (outputs, inputs // MX_GROUP))}

    def encode(w: Floats, importance: Floats | None) -> Encoded:
        parts = in_threads(mxfp4_values, np.array_split(w.reshape(-1, MX_GROUP), -(-w.size // CHUNK_WEIGHTS)))
        exponents, q = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return {"weight_packed": _pairs(q, len(w)), "weight_scale": exponents.reshape(len(w), -1)}

    return LinearFormat(config, shapes, encode, lambda outputs, inputs: inputs % MX_GROUP == 0)


def mxfp8(quantizes_inputs: bool) -> LinearFormat:
    settings = _settings(8, MX_GROUP, "group", BYTE)
    config = compressed("mxfp8-quantized", settings, {**settings, "dynamic": True} if quantizes_inputs else None)

    def shapes(outputs: int, inputs: int) -> Shapes:
        values: Shapes = {"weight": ("F8_E4M3", (outputs, inputs))}
        return values | {"weight_scale": ("U8", (outputs, inputs // MX_GROUP))}

    def encode(w: Floats, importance: Floats | None) -> Encoded:
        parts = in_threads(_mxfp8_groups, np.array_split(w.reshape(-1, MX_GROUP), -(-w.size // CHUNK_WEIGHTS)))
        exponents, q = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return {"weight": q.reshape(w.shape), "weight_scale": exponents.reshape(len(w), -1)}

    return LinearFormat(config, shapes, encode, lambda outputs, inputs: inputs % MX_GROUP == 0)


def _mxfp8_groups(x: Floats) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The scale is the smallest power of two by which no weight exceeds the largest float."""
    largest = np.abs(x).max(1, keepdims=True)
    ratio = np.where(largest > 0, largest / float8.LARGEST, np.float32(1))
    exponents = np.clip(np.ceil(np.log2(ratio)).astype(np.int32), -127, 127)
    return (exponents + 127).astype(np.uint8), float8.to_e4m3(np.ldexp(x, -exponents))


def nvfp4(quantizes_inputs: bool) -> LinearFormat:
    """`quantizes_inputs`: with a scale of a layer's inputs from the calibration; that of a group comes at run time."""
    settings = _settings(4, NV_GROUP, "tensor_group", E4M3) | {"zp_dtype": "torch.float8_e4m3fn"}
    inputs_too = {**settings, "dynamic": "local", "observer": "static_minmax"} if quantizes_inputs else None
    scale = InputScale("input_global_scale", lambda largest: LARGEST_NVFP4 / largest) if quantizes_inputs else None

    def shapes(outputs: int, inputs: int) -> Shapes:
        tensors: Shapes = {
            "weight_packed": ("U8", (outputs, inputs // 2)),
            "weight_scale": ("F8_E4M3", (outputs, inputs // NV_GROUP)),
            "weight_global_scale": ("F32", (1,)),
        }
        return tensors | ({"input_global_scale": ("F32", (1,))} if quantizes_inputs else {})

    return LinearFormat(
        compressed("nvfp4-pack-quantized", settings, inputs_too),
        shapes,
        lambda w, importance: nvfp4_tensors(w, importance, float(np.abs(w).max())),
        lambda outputs, inputs: inputs % NV_GROUP == 0,
        input_scale=scale,
        encode_stacked=nvfp4_tensors,
    )


def nvfp4_tensors(w: Floats, importance: Floats | None, largest: float) -> Encoded:
    """The number of the layer is the largest power of two by which scales of weights up to `largest` are e4m3 floats:
    w = scale * q has then few enough bits for bf16 to hold."""
    whole = np.float32(2.0 ** np.floor(np.log2(LARGEST_NVFP4 / largest)) if largest > 0 else 1)
    step = max(CHUNK_WEIGHTS // w.shape[1], 1)
    chunks = [w[first : first + step] for first in range(0, len(w), step)]
    parts = in_threads(lambda rows: _nvfp4_rows(rows, importance, whole), chunks)
    scales, q = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"weight_packed": _pairs(q, len(w)), "weight_scale": scales, "weight_global_scale": whole.reshape(1)}


def _nvfp4_rows(w: Floats, importance: Floats | None, whole: np.float32) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    x = w.reshape(-1, NV_GROUP)
    counted = None if importance is None else np.broadcast_to(importance, w.shape).reshape(-1, NV_GROUP)
    halved = np.abs(native.search_codebook(np.ascontiguousarray(x), error_weights(x, counted), NV_RANGES, ASCENDING))
    stored = float8.to_e4m3(halved * (2 * whole)).reshape(-1, 1)
    scales = dequantize(StoredTensor("", stored.shape, F8_E4M3, stored)) / (2 * whole)
    return stored.reshape(len(w), -1), nearest_entry(x * inverse(scales), E2M1_VALUES)


def _pairs(q: NDArray[np.uint8], rows: int) -> NDArray[np.uint8]:
    """Two values a byte, the first in the low nibble."""
    high = np.left_shift(q[:, 1::2], 4, dtype=np.uint8)
    return np.bitwise_or(q[:, ::2], high, dtype=np.uint8).reshape(rows, -1)
