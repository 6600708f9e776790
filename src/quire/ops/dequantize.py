"""Stored weights as fp32: the plain specification of every storage type.

Each function takes blocks uint8 [n, block_bytes] and returns their weights fp32 [n, block]. The fast versions, in C++
and torch, are tested against these. A block of 32 has one fp16 scale d (and an offset m). A block of 256 has 8 or 16
groups whose scales are themselves quantized: they are multiplied with the super-scale d of the block, the offsets with
dmin. The values of IQ4, NF4 and 4-bit floats are indices into a codebook; IQ1 to IQ3 are in dequantize_grids.py."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.ops.dequantize_grids import DEQUANTIZE_GRIDS
from quire.ops.tensors import BF16, F16, F32, StoredTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# 4-bit floats: a sign, two bits of exponent, one of mantissa. The smallest is 0.5, so these are doubled.
E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
# bitsandbytes' codebooks. NF4: quantiles of a normal distribution, zero among them.
NF4_VALUES = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
FP4_VALUES = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
FP4_VALUES = np.concatenate((FP4_VALUES, -FP4_VALUES))


def dequantize(tensor: StoredTensor) -> Floats:
    """-> fp32 [rows, columns], rows in the tensor's order."""
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    blocks = np.ascontiguousarray(data).reshape(-1, tensor.type.block_bytes)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf in the file stay, without a warning
        weights = _BY_TYPE[tensor.type.name](blocks)
    weights = weights.reshape(tensor.num_rows, tensor.num_columns)
    if tensor.column_order is None:
        return weights
    in_order = np.empty_like(weights)
    in_order[:, tensor.column_order] = weights
    return in_order


def as_floats(tensor: StoredTensor) -> StoredTensor:
    """For matrices that are transposed: quantized groups lie along rows. Quantized weights become fp16, which moves a
    weight by less than a 2000th of itself; floats stay as they are."""
    if tensor.type in (F32, F16, BF16):
        return tensor
    weights = dequantize(tensor).astype(np.float16)
    return StoredTensor(tensor.name, tensor.shape, F16, weights.view(np.uint8))


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)  # the upper half of an fp32


def _q4_0(blocks: Bytes) -> Floats:
    d, q = _split(blocks, 2)
    return _scale(d) * (_nibbles(q) - np.float32(8))


def _q4_1(blocks: Bytes) -> Floats:
    d, m, q = _split(blocks, 2, 2)
    return _scale(d) * _nibbles(q) + _scale(m)


def _q5_0(blocks: Bytes) -> Floats:
    d, fifth, nibbles = _split(blocks, 2, 4)
    q: Floats = _nibbles(nibbles) + _bits(fifth) * np.float32(16)
    return _scale(d) * (q - np.float32(16))


def _q5_1(blocks: Bytes) -> Floats:
    d, m, fifth, q = _split(blocks, 2, 2, 4)
    return _scale(d) * (_nibbles(q) + _bits(fifth) * np.float32(16)) + _scale(m)


def _q8_0(blocks: Bytes) -> Floats:
    d, q = _split(blocks, 2)
    return _scale(d) * q.view(np.int8).astype(np.float32)


def _q2_k(blocks: Bytes) -> Floats:
    scales, q, d, dmin = _split(blocks, 16, 64, 2)
    scale = _scale(d) * (scales & 15).astype(np.float32)  # 16 groups of 16
    offset = _scale(dmin) * (scales >> 4).astype(np.float32)
    return _grouped(scale, _crumbs(q)) - np.repeat(offset, 16, axis=1)


def _q3_k(blocks: Bytes) -> Floats:
    third, q, scales, d = _split(blocks, 32, 64, 12)
    # Bit j of third[i] belongs to weight 32 * j + i; where it is clear, 4 is subtracted.
    high = ((third[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1).reshape(-1, 256)
    values = _crumbs(q) + high.astype(np.float32) * np.float32(4) - np.float32(4)
    return _grouped(_scale(d) * _six_bit_scales(scales), values)


def _q4_k(blocks: Bytes) -> Floats:
    d, dmin, packed, q = _split(blocks, 2, 2, 12)
    scales, offsets = _six_bit_pairs(packed)
    return _grouped(_scale(d) * scales, _nibbles(q, run=32)) - np.repeat(_scale(dmin) * offsets, 32, axis=1)


def _q5_k(blocks: Bytes) -> Floats:
    d, dmin, packed, fifth, q = _split(blocks, 2, 2, 12, 32)
    scales, offsets = _six_bit_pairs(packed)
    high = ((fifth[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1).reshape(-1, 256)  # as in Q3_K
    values = _nibbles(q, run=32) + high.astype(np.float32) * np.float32(16)
    return _grouped(_scale(d) * scales, values) - np.repeat(_scale(dmin) * offsets, 32, axis=1)


def _q6_k(blocks: Bytes) -> Floats:
    low, high, scales, d = _split(blocks, 128, 64, 16)
    values = _nibbles(low, run=64) + _crumbs(high) * np.float32(16) - np.float32(32)
    return _grouped(_scale(d) * scales.view(np.int8).astype(np.float32), values)


def _iq4_nl(blocks: Bytes) -> Floats:
    d, q = _split(blocks, 2)
    return _scale(d) * _lookup(IQ4_VALUES, q)


def _iq4_xs(blocks: Bytes) -> Floats:
    d, high, low, q = _split(blocks, 2, 2, 4)
    # Six bits a scale: four in the nibbles of `low`, two in the 16 bits of `high`.
    shifts = np.arange(0, 16, 2, dtype=np.uint16)
    top = (high.view(np.uint16) >> shifts & 3).astype(np.float32)
    scales: Floats = _nibbles(low, run=1) + top * np.float32(16) - np.float32(32)
    return _grouped(_scale(d) * scales, _lookup(IQ4_VALUES, q))


def _mxfp4(blocks: Bytes) -> Floats:
    exponent, q = _split(blocks, 1)
    # 2^(exponent - 127) for the values themselves, half of that for doubled ones.
    return np.ldexp(np.float32(1), exponent.astype(np.int32) - 128) * _lookup(E2M1_VALUES, q)


def _nvfp4(blocks: Bytes) -> Floats:
    scales, q = _split(blocks, 4)
    halved = np.where(scales == 0x7F, np.float32(0), _e4m3((scales & 0x7F).astype(np.uint8)) * np.float32(0.5))
    halved[scales == 0xFF] = 240  # all ones is a number only with a sign, which is ignored
    values = E2M1_VALUES[_nibbles(q, run=8).astype(np.intp)]
    return _grouped(halved, values)


def _tq1_0(blocks: Bytes) -> Floats:
    # A byte is a fraction in base 3: times a power of 3, its next digit is the integer part.
    long, short, last, d = _split(blocks, 32, 16, 4)
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [long[:, None] * powers, short[:, None] * powers, last[:, None] * powers[:4]]
    fractions = np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1)
    digits: Floats = (fractions.astype(np.uint16) * 3 >> 8).astype(np.float32)
    return _scale(d) * (digits - np.float32(1))


def _tq2_0(blocks: Bytes) -> Floats:
    q, d = _split(blocks, 64)
    return _scale(d) * (_crumbs(q) - np.float32(1))


def _q4_z(blocks: Bytes) -> Floats:
    d, zero, q = _split(blocks, 2, 2)
    return _scale(d) * (_nibbles(q) - _scale(zero))


def _q4_f(blocks: Bytes) -> Floats:
    d, m, q = _split(blocks, 4, 4)
    return d.view(np.float32) * _nibbles(q) + m.view(np.float32)


def _q8_f(blocks: Bytes) -> Floats:
    d, q = _split(blocks, 4)
    return d.view(np.float32) * q.view(np.int8).astype(np.float32)


def _q8_m(blocks: Bytes) -> Floats:
    d, m, q = _split(blocks, 4, 4)
    return d.view(np.float32) * q.view(np.int8).astype(np.float32) + m.view(np.float32)


def _nf4(blocks: Bytes) -> Floats:
    d, q = _split(blocks, 4)
    return d.view(np.float32) * _lookup(NF4_VALUES, q)


def _fp4(blocks: Bytes) -> Floats:
    d, q = _split(blocks, 4)
    return d.view(np.float32) * _lookup(FP4_VALUES, q)


def _fp8(blocks: Bytes) -> Floats:
    d, q = _split(blocks, 4)
    return d.view(np.float32) * _e4m3(q)


def _e4m3(q: Bytes) -> Floats:
    """A sign, four bits of exponent, three of mantissa. All ones are NaN; there is no Inf."""
    return _E4M3_VALUES[q]


def _e5m2(q: Bytes) -> Floats:
    """The upper half of an fp16."""
    return (q.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


def _every_e4m3() -> Floats:
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> 3, magnitude & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)).astype(np.float32)
    values[127] = np.nan
    return np.concatenate((values, -values))


_E4M3_VALUES = _every_e4m3()


def _split(blocks: Bytes, *sizes: int) -> list[Bytes]:
    """The fields of each block, by their bytes; the last takes the rest."""
    return [np.ascontiguousarray(part) for part in np.split(blocks, np.cumsum(sizes), axis=1)]


def _scale(field: Bytes) -> Floats:
    """fp16 [n, 2 bytes] -> [n, 1]"""
    return field.view(np.float16).astype(np.float32)


def _nibbles(q: Bytes, run: int = 16) -> Floats:
    """Of every `run` bytes, the low halves and then the high halves: [n, b] -> [n, 2 b]"""
    runs = q.reshape(len(q), -1, 1, run)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(len(q), -1).astype(np.float32)


def _lookup(values: Floats, q: Bytes) -> Floats:
    """The codebook entries of nibbles: [16], [n, b] -> [n, 2 b]"""
    return values[_nibbles(q).astype(np.intp)]


def _crumbs(q: Bytes) -> Floats:
    """Of every 32 bytes, the lowest two bits, then the next two, and so on: [n, 64] -> [n, 256]"""
    runs = q.reshape(len(q), -1, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    return ((runs >> shifts) & 3).reshape(len(q), -1).astype(np.float32)


def _bits(field: Bytes) -> Floats:
    """[n, 4] -> [n, 32], the lowest bit of the first byte first"""
    return np.unpackbits(field, axis=1, bitorder="little").astype(np.float32)


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """The scales and offsets of 8 groups from 12 bytes: [n, 12] -> two of [n, 8].

    Bytes 0-3 hold scales 0-3 and bytes 4-7 offsets 0-3 in their low six bits. Bytes 8-11 hold the low four bits of
    scales 4-7 and of offsets 4-7; their high two bits are the top bits of bytes 0-3 and 4-7."""
    a, b, c = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((a & 63, (c & 15) | ((a >> 6) << 4)), axis=1)
    offsets = np.concatenate((b & 63, (c >> 4) | ((b >> 6) << 4)), axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _six_bit_scales(packed: Bytes) -> Floats:
    """16 signed scales from 12 bytes: [n, 12] -> [n, 16].

    The low four bits fill bytes 0-7, first the low halves, then the high ones; byte 8 + i % 4 holds the top two bits of
    scale i, at bit 2 * (i // 4)."""
    low = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    shifts = np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    high = ((packed[:, None, 8:] >> shifts) & 3).reshape(-1, 16)
    scales: Floats = (low | (high << 4)).astype(np.float32)
    return scales - np.float32(32)


def _grouped(scales: Floats, values: Floats) -> Floats:
    """Every group of values times its scale: [n, groups], [n, 256] -> [n, 256]"""
    groups = values.reshape(*scales.shape, -1)
    return (scales[:, :, None] * groups).reshape(values.shape)


_BY_TYPE: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "Q4_Z": _q4_z,
    "Q4_F": _q4_f,
    "Q8_F": _q8_f,
    "Q8_M": _q8_m,
    "NF4": _nf4,
    "FP4": _fp4,
    "F8_E4M3": _e4m3,
    "F8_E5M2": _e5m2,
    "FP8": _fp8,
    **DEQUANTIZE_GRIDS,
}
