"""Weights -> blocks of GGUF's types: the inverse of ops/dequantize.py.

An encoder takes weights fp32 [n, block] and their importance (the mean square of the inputs they are multiplied with,
[n, block]) or None, and gives blocks uint8 [n, block_bytes]. K-quants are always searched; types with blocks of 32 are
searched where the importance is known, and span the range of their weights where it is not."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.compiled import native
from quire.ops.dequantize import E2M1_VALUES, IQ4_VALUES
from quire.quantize.gguf_grids import GRID_TYPES, grid_blocks
from quire.quantize.gguf_ternary import TERNARY_TYPES
from quire.quantize.search import (
    Floats,
    codebook_scales,
    inverse,
    largest_magnitude,
    offset_scales,
    rounded,
    symmetric_scales,
    to_fp16,
)

Bytes = NDArray[np.uint8]
Quants = NDArray[Any]  # whole numbers of at most 8 bits
Encoder = Callable[[Floats, Floats | None], Bytes]

SMALL_CODEBOOK = 16


def error_weights(x: Floats, importance: Floats | None) -> Floats:
    """How much an error counts. Larger weights matter more than their importance says: a block is chosen as a whole."""
    mean = np.mean(x * x, axis=1, keepdims=True)
    if importance is None:
        plain: Floats = np.abs(x) + np.sqrt(mean)
        return plain
    weights: Floats = importance * np.sqrt(mean + x * x)
    return np.where(weights.sum(1, keepdims=True) > 0, weights, np.float32(1))  # inputs that are never other than 0


# -- floats ------------------------------------------------------------------------------------------------------------


def _f32(x: Floats, importance: Floats | None) -> Bytes:
    return np.ascontiguousarray(x).view(np.uint8)


def _f16(x: Floats, importance: Floats | None) -> Bytes:
    return np.ascontiguousarray(to_fp16(x)).view(np.uint8)


def bf16(x: Floats) -> NDArray[np.uint16]:
    """To the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _bf16(x: Floats, importance: Floats | None) -> Bytes:
    return bf16(x).view(np.uint8)


# -- blocks of 32 ------------------------------------------------------------------------------------------------------


def _symmetric_32(x: Floats, importance: Floats | None, levels: int) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """-> scales [n, 1], q + levels [n, 32]"""
    if importance is None:
        largest = largest_magnitude(x)
        scales = to_fp16(largest / np.float32(-levels))
    else:
        scales = to_fp16(symmetric_scales(x, error_weights(x, importance), levels))
    q = rounded(x * inverse(scales.astype(np.float32)), -levels, levels - 1)
    return scales, (q + levels).astype(np.uint8)


def _offset_32(x: Floats, importance: Floats | None, levels: int) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """-> scales and offsets [n, 2], q [n, 32]"""
    if importance is None:
        low = x.min(1, keepdims=True)
        fields = np.concatenate(((x.max(1, keepdims=True) - low) / np.float32(levels), low), 1)
    else:
        fields = np.concatenate(offset_scales(x, error_weights(x, importance), levels, free=True), 1)
    stored = to_fp16(fields)
    scale, offset = np.split(stored.astype(np.float32), 2, axis=1)
    return stored, rounded((x - offset) * inverse(scale), 0, levels).astype(np.uint8)


def _nibbles(q: Quants, run: int = 16) -> Bytes:
    """Of every 2 * run values, the first `run` in the low halves of bytes and the others in the high halves."""
    runs = q.reshape(len(q), -1, 2, run)
    pairs: Bytes = runs[:, :, 0] | runs[:, :, 1] << 4
    return pairs.reshape(len(q), -1)


def _fifth_bits(q: Quants) -> Bytes:
    return np.packbits(q >> 4, axis=1, bitorder="little")


def _as_bytes(values: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _q4_0(x: Floats, importance: Floats | None) -> Bytes:
    scales, q = _symmetric_32(x, importance, 8)
    return np.concatenate((_as_bytes(scales), _nibbles(q)), 1)


def _q5_0(x: Floats, importance: Floats | None) -> Bytes:
    scales, q = _symmetric_32(x, importance, 16)
    return np.concatenate((_as_bytes(scales), _fifth_bits(q), _nibbles(q & 15)), 1)


def _q4_1(x: Floats, importance: Floats | None) -> Bytes:
    fields, q = _offset_32(x, importance, 15)
    return np.concatenate((_as_bytes(fields), _nibbles(q)), 1)


def _q5_1(x: Floats, importance: Floats | None) -> Bytes:
    fields, q = _offset_32(x, importance, 31)
    return np.concatenate((_as_bytes(fields), _fifth_bits(q), _nibbles(q & 15)), 1)


def _q8_0(x: Floats, importance: Floats | None) -> Bytes:
    """Rounded to nearest, as `--quantization int8` does: a search gains nothing in 8 bits."""
    blocks: Bytes = native.quantize("F32", _as_bytes(x), 32, "Q8_0")
    return blocks


def nearest_entry(values: NDArray[Any], codebook: Floats) -> NDArray[np.uint8]:
    """The index of the nearest entry of a codebook that may be in any order."""
    order = np.argsort(codebook, kind="stable").astype(np.uint8)
    ordered = codebook[order]
    middles = (ordered[1:] + ordered[:-1]) / 2
    if len(codebook) > SMALL_CODEBOOK:
        return order[np.searchsorted(middles, values)]
    rank = np.zeros(values.shape, np.uint8)
    for middle in middles:  # a tenth of the time of a binary search
        rank += (values > middle).view(np.uint8)
    return order[rank]


def _iq4_nl(x: Floats, importance: Floats | None) -> Bytes:
    stored = to_fp16(codebook_scales(x, error_weights(x, importance), IQ4_VALUES))
    q = nearest_entry(x * inverse(stored.astype(np.float32)), IQ4_VALUES)
    return np.concatenate((_as_bytes(stored), _nibbles(q)), 1)


def mxfp4_values(x: Floats) -> tuple[Bytes, Bytes]:
    """-> the exponents of scales, plus 127 [n, 1], and e2m1 floats [n, 32]. The scale is the power of two by which the
    largest weight is at most the largest float, 6, but for rounding."""
    largest = np.abs(x).max(1, keepdims=True)
    exponents = np.floor(np.log2(np.where(largest > 0, largest, np.float32(1)))).astype(np.int32) - 2
    stored = np.where(largest > 0, np.clip(exponents + 127, 0, 254), 0).astype(np.uint8)
    halved = np.ldexp(np.float32(1), stored.astype(np.int32) - 128)
    return stored, nearest_entry(x * inverse(halved), E2M1_VALUES)


def _mxfp4(x: Floats, importance: Floats | None) -> Bytes:
    exponents, q = mxfp4_values(x)
    return np.concatenate((exponents, _nibbles(q)), 1)


# -- blocks of 256 -----------------------------------------------------------------------------------------------------


def _groups(x: Floats, weights: Floats, size: int) -> tuple[Floats, Floats]:
    return x.reshape(-1, size), weights.reshape(-1, size)


def _with_offsets(
    x: Floats, importance: Floats | None, levels: int, size: int, most: int
) -> tuple[NDArray[np.float16], NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """Groups of `size` whose scales and offsets are integers up to `most`: the two super-scales [n, 2], scales and
    offsets [n, groups], q [n, 256]."""
    count = len(x)
    weights = error_weights(x, importance)
    scales, offsets = (part.reshape(count, -1) for part in offset_scales(*_groups(x, weights, size), levels))
    highest = np.stack((scales.max(1), -offsets.min(1)), 1)
    stored = to_fp16(highest / np.float32(most))
    d, dmin = np.split(stored.astype(np.float32), 2, axis=1)
    whole_scales = rounded(scales * inverse(d), 0, most)
    whole_offsets = rounded(-offsets * inverse(dmin), 0, most)
    step, low = (d * whole_scales)[:, :, None], (dmin * whole_offsets)[:, :, None]
    q = rounded((x.reshape(count, -1, size) + low) * inverse(step), 0, levels).reshape(count, 256)
    return stored, whole_scales.astype(np.uint8), whole_offsets.astype(np.uint8), q.astype(np.uint8)


def _without_offsets(
    x: Floats, importance: Floats | None, levels: int, most: int
) -> tuple[NDArray[np.float16], NDArray[np.int8], NDArray[np.uint8]]:
    """Groups of 16 whose scales are integers from -most to most - 1: the super-scale [n, 1], scales [n, 16], q + levels
    [n, 256]."""
    count = len(x)
    weights = x * x if importance is None else error_weights(x, importance)
    scales = symmetric_scales(*_groups(x, weights, 16), levels).reshape(count, 16)
    largest = largest_magnitude(scales)
    stored = to_fp16(largest / np.float32(-most))
    whole = rounded(scales * inverse(stored.astype(np.float32)), -most, most - 1)
    step = (stored.astype(np.float32) * whole)[:, :, None]
    q = rounded(x.reshape(count, 16, 16) * inverse(step), -levels, levels - 1)
    return stored, whole.astype(np.int8), (q + levels).astype(np.uint8).reshape(count, 256)


def _crumbs(q: Quants) -> Bytes:
    """Two bits a value: of every 128, values 0-31 in the lowest bits of 32 bytes, 32-63 in the next, and so on."""
    runs = q.reshape(len(q), -1, 4, 32)
    fours: Bytes = runs[:, :, 0] | runs[:, :, 1] << 2 | runs[:, :, 2] << 4 | runs[:, :, 3] << 6
    return fours.reshape(len(q), -1)


def _bit_planes(bits: Quants) -> Bytes:
    """Bit j of byte i is that of value 32 * j + i."""
    planes = bits.reshape(len(bits), 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    stacked: Bytes = np.bitwise_or.reduce(planes, axis=1)
    return stacked


def _six_bit_pairs(scales: Quants, offsets: Quants) -> Bytes:
    first = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    second = offsets[:, :4] | (offsets[:, 4:] >> 4) << 6
    return np.concatenate((first, second, (scales[:, 4:] & 15) | (offsets[:, 4:] & 15) << 4), 1)


def _q2_k(x: Floats, importance: Floats | None) -> Bytes:
    fields, scales, offsets, q = _with_offsets(x, importance, 3, 16, 15)
    return np.concatenate((scales | offsets << 4, _crumbs(q), _as_bytes(fields)), 1)


def _q3_k(x: Floats, importance: Floats | None) -> Bytes:
    d, signed, q = _without_offsets(x, importance, 4, 32)
    scales = (signed + 32).astype(np.uint8)
    low = (scales & 15).reshape(len(x), 2, 8)
    high = (scales >> 4).reshape(len(x), 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = np.concatenate((low[:, 0] | low[:, 1] << 4, np.bitwise_or.reduce(high, axis=1)), 1)
    return np.concatenate((_bit_planes(q >> 2), _crumbs(q & 3), packed, _as_bytes(d)), 1)


def _q4_k(x: Floats, importance: Floats | None) -> Bytes:
    fields, scales, offsets, q = _with_offsets(x, importance, 15, 32, 63)
    return np.concatenate((_as_bytes(fields), _six_bit_pairs(scales, offsets), _nibbles(q, 32)), 1)


def _q5_k(x: Floats, importance: Floats | None) -> Bytes:
    fields, scales, offsets, q = _with_offsets(x, importance, 31, 32, 63)
    parts = (
        _as_bytes(fields),
        _six_bit_pairs(scales, offsets),
        _bit_planes(q >> 4),
        _nibbles(q & 15, 32),
    )
    return np.concatenate(parts, 1)


def _q6_k(x: Floats, importance: Floats | None) -> Bytes:
    d, scales, q = _without_offsets(x, importance, 32, 128)
    return np.concatenate((_nibbles(q & 15, 64), _crumbs(q >> 4), _as_bytes(scales), _as_bytes(d)), 1)


def _iq4_xs(x: Floats, importance: Floats | None) -> Bytes:
    count = len(x)
    scales = codebook_scales(*_groups(x, error_weights(x, importance), 32), IQ4_VALUES).reshape(count, 8)
    stored = to_fp16(largest_magnitude(scales) / np.float32(-32))
    whole = rounded(scales * inverse(stored.astype(np.float32)), -32, 31)
    step = (stored.astype(np.float32) * whole)[:, :, None]
    q = nearest_entry(x.reshape(count, 8, 32) * inverse(step), IQ4_VALUES).reshape(count, 256)
    six = (whole + 32).astype(np.uint8)
    high = np.bitwise_or.reduce((six >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1)
    return np.concatenate((_as_bytes(stored), _as_bytes(high[:, None]), _nibbles(six & 15, 1), _nibbles(q)), 1)


def _on_grid(name: str) -> Encoder:
    kind, stored = GRID_TYPES[name]
    return lambda x, importance: stored(grid_blocks(x, error_weights(x, importance), kind))


def _ternary(name: str) -> Encoder:
    encode = TERNARY_TYPES[name]
    return lambda x, importance: encode(x, error_weights(x, importance))


ENCODERS: dict[str, Encoder] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
    **{name: _on_grid(name) for name in GRID_TYPES},
    **{name: _ternary(name) for name in TERNARY_TYPES},
}
