"""Weights -> blocks of GGUF's types of about 1 to 2 bits, whose values are -1, 0 and 1 times a scale.

IQ1_S and IQ1_M: vectors of 8 become the nearest entry of a grid, and an eighth of the scale is added to all of a group
or subtracted. TQ1_0 and TQ2_0: one scale for 256 weights; models that were trained with three values lose nothing.
Encoders are as in gguf_types.py."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.dequantize_grids import DELTA, IQ1_VALUES, grid
from quire.quantize.gguf_grids import grid_halves
from quire.quantize.search import Floats, inverse, nearest_in_grid, rounded, to_fp16

Bytes = NDArray[np.uint8]

IQ1_REACHES = np.array([0.85, 1.1, 1.4, 1.8, 2.3], np.float32)  # what the largest weight becomes: above 1.125 clips it
TERNARY_REACHES = np.array([1.0, 1.2, 1.4, 1.7, 2.1, 2.6], np.float32)
IQ1_UNITS = 2 * np.arange(8, dtype=np.float32) + 1  # what the scale of a group may be, times its super-scale
SHIFTS = np.array([0, 3, 6, 9], np.uint16)


@dataclass(frozen=True, slots=True, eq=False)
class TernaryBlocks:
    """super-scales fp16 [n, 1], indices of scales [n, groups], entries [n, 32], which of the signs of the eighth are
    negative [n, signs]"""

    d: NDArray[np.float16]
    scales: NDArray[np.uint8]
    entries: NDArray[np.int32]
    negative: NDArray[np.bool_]


def _nearest(x: Floats, weights: Floats, size: int) -> tuple[NDArray[np.int32], Floats, NDArray[np.bool_]]:
    """Weights in units of their scale [n, 256] -> entries [n, 32], their values, and the signs of the eighth, of which
    `size` weights share one."""
    best: list[tuple[NDArray[np.int32], Floats, Floats]] = []
    for delta in (DELTA, -DELTA):
        vectors, counted = (x - delta).reshape(-1, 8), weights.reshape(-1, 8)
        entries = nearest_in_grid(vectors, counted, IQ1_VALUES, grid_halves("IQ1")).reshape(len(x), 32)
        values = IQ1_VALUES[grid("IQ1")[entries]].reshape(x.shape) + delta
        best.append((entries, values, (weights * np.square(x - values)).reshape(len(x), -1, size).sum(2)))
    negative = best[1][2] < best[0][2]
    values = np.where(np.repeat(negative, size, axis=1), best[1][1], best[0][1])
    entries = np.where(np.repeat(negative, size // 8, axis=1), best[1][0], best[0][0])
    return entries, values, negative


def _searched(x: Floats, weights: Floats, group: int, size: int) -> Floats:
    """-> the scales of groups [n, groups]: several reaches are tried, each refitted by weighted least squares."""
    shape = (len(x), 256 // group, group)
    over = inverse(np.abs(x).reshape(shape).max(2))
    best, scales = np.full(shape[:2], -1, np.float32), np.zeros(shape[:2], np.float32)
    for reach in IQ1_REACHES:
        _, values, _ = _nearest(x * np.repeat(reach * over, group, axis=1), weights, size)
        along = (weights * x * values).reshape(shape).sum(2)
        scale = along * inverse((weights * values * values).reshape(shape).sum(2))
        gain = along * scale
        scales, best = np.where(gain > best, scale, scales), np.maximum(gain, best)
    return np.maximum(scales, 0)


def ternary_blocks(x: Floats, weights: Floats, group: int, size: int) -> TernaryBlocks:
    """x and weights [n, 256]. `group`: weights that share a scale; `size`: a sign of the eighth."""
    scales = _searched(x, weights, group, size)
    d = scales.max(1, keepdims=True) / IQ1_UNITS[-1]
    indices = rounded((scales * inverse(d) - np.float32(1)) * np.float32(0.5), 0, 7).astype(np.uint8)
    units = np.repeat(IQ1_UNITS[indices], group, axis=1)
    entries, values, negative = _nearest(x * inverse(d * units), weights, size)
    values = values * units
    along = (weights * x * values).sum(1, keepdims=True)
    refitted = along * inverse((weights * values * values).sum(1, keepdims=True))
    return TernaryBlocks(to_fp16(np.where(d > 0, refitted, np.float32(0))), indices, entries, negative)


def iq1_s(x: Floats, weights: Floats) -> Bytes:
    """The bytes of IQ1_S: for every 32 weights four entries of 11 bits, the scale and the sign."""
    blocks = ternary_blocks(x, weights, 32, 32)
    high = ((blocks.entries >> 8).astype(np.uint16).reshape(-1, 8, 4) << SHIFTS).sum(2, dtype=np.uint16)
    words = high | blocks.scales.astype(np.uint16) << np.uint16(12) | blocks.negative.astype(np.uint16) << np.uint16(15)
    return np.concatenate((_bytes(blocks.d), blocks.entries.astype(np.uint8), _bytes(words)), 1)


def iq1_m(x: Floats, weights: Floats) -> Bytes:
    """A scale for 16 weights, a sign for 8; the super-scale is in the top bits of four words, the lowest first."""
    blocks = ternary_blocks(x, weights, 16, 8)
    nibbles = (blocks.entries >> 8).astype(np.uint8) | blocks.negative.astype(np.uint8) << np.uint8(3)
    high = nibbles[:, ::2] | nibbles[:, 1::2] << np.uint8(4)
    words = (blocks.scales.astype(np.uint16).reshape(-1, 4, 4) << SHIFTS).sum(2, dtype=np.uint16)
    top = blocks.d.view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & np.uint16(15)
    words |= top << np.uint16(12)
    return np.concatenate((blocks.entries.astype(np.uint8), high, _bytes(words)), 1)


def _digits(x: Floats, weights: Floats) -> tuple[NDArray[np.float16], Bytes]:
    """-> scales [n, 1], and 0, 1 or 2 for each weight"""
    over = inverse(np.abs(x).max(1, keepdims=True))
    best, scales = np.full((len(x), 1), -1, np.float32), np.zeros((len(x), 1), np.float32)
    for reach in TERNARY_REACHES:
        q = rounded(x * (reach * over), -1, 1)
        along = (weights * x * q).sum(1, keepdims=True)
        scale = along * inverse((weights * q * q).sum(1, keepdims=True))
        gain = along * scale
        scales, best = np.where(gain > best, scale, scales), np.maximum(gain, best)
    stored = to_fp16(scales)
    q = rounded(x * inverse(stored.astype(np.float32)), -1, 1)
    return stored, (q + 1).astype(np.uint8)


def tq1_0(x: Floats, weights: Floats) -> Bytes:
    """Five digits a byte, which is a fraction in base 3: its next digit is the integer part of 3 times it."""
    d, digits = _digits(x, weights)
    runs = (
        digits[:, :160].reshape(-1, 5, 32),
        digits[:, 160:240].reshape(-1, 5, 16),
        digits[:, 240:].reshape(-1, 4, 4),
    )
    powers = np.array([81, 27, 9, 3, 1], np.uint16)[:, None]
    packed = []
    for run in runs:
        numbers = (run * powers[: run.shape[1]]).sum(1, dtype=np.uint16)
        packed.append(((numbers * 256 + 242) // 243).astype(np.uint8))
    return np.concatenate((*packed, _bytes(d)), 1)


def tq2_0(x: Floats, weights: Floats) -> Bytes:
    """Two bits a weight: of every 128, weights 0-31 are in the lowest bits of 32 bytes, 32-63 in the next, ..."""
    d, digits = _digits(x, weights)
    runs = digits.reshape(len(x), 2, 4, 32)
    q = runs[:, :, 0] | runs[:, :, 1] << 2 | runs[:, :, 2] << 4 | runs[:, :, 3] << 6
    return np.concatenate((q.reshape(len(x), -1), _bytes(d)), 1)


def _bytes(values: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


TERNARY_TYPES = {"IQ1_S": iq1_s, "IQ1_M": iq1_m, "TQ1_0": tq1_0, "TQ2_0": tq2_0}
