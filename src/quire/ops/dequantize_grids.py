"""GGUF's i-quants as fp32: quantized values are indices into grids of vectors.

A grid is a sorted set of vectors of digits, the first digit the least significant. `grids.bin` has one bit for every
possible vector: four grids of 8 digits of base 3, then two of 4 digits of base 8. Each type has its own meaning of the
digits. A block is 256 weights; functions are as in dequantize.py."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

GRIDS = {"IQ2_XXS": (3, 8), "IQ2_XS": (3, 8), "IQ2_S": (3, 8), "IQ1": (3, 8), "IQ3_XXS": (8, 4), "IQ3_S": (8, 4)}

IQ2_VALUES = np.array([8, 25, 43], np.float32)
IQ3_XXS_VALUES = np.array([4, 12, 20, 28, 36, 44, 52, 62], np.float32)
IQ3_S_VALUES = np.arange(1, 16, 2, dtype=np.float32)
IQ1_VALUES = np.array([-1, 0, 1], np.float32)
DELTA = np.float32(0.125)  # IQ1 adds or subtracts it

_EIGHT_SIGNS = np.array([seven | (seven.bit_count() & 1) << 7 for seven in range(128)], np.uint8)
_TWO_NIBBLES = np.array([0, 4], np.uint8)
_FOUR_CRUMBS = np.array([0, 2, 4, 6], np.uint8)
_FOUR_SEVENS = np.array([0, 7, 14, 21], np.uint32)
_FOUR_THREES = np.array([0, 3, 6, 9], np.uint16)


@cache
def grid(name: str) -> NDArray[np.intp]:
    """-> [entries, digits]"""
    stored = np.frombuffer((Path(__file__).parent / "grids.bin").read_bytes(), np.uint8)
    offset = 0
    for each, (base, num_digits) in GRIDS.items():
        size = -(-(base**num_digits) // 8)
        if each == name:
            vectors = np.flatnonzero(np.unpackbits(stored[offset : offset + size], bitorder="little"))
            return vectors[:, None] // base ** np.arange(num_digits) % base
        offset += size
    raise KeyError(name)


def _iq2_xxs(blocks: Bytes) -> Floats:
    d, rest = blocks[:, :2], np.ascontiguousarray(blocks[:, 2:]).view(np.uint32).reshape(-1, 8, 2)
    entries = np.ascontiguousarray(rest[..., 0]).view(np.uint8)
    words = rest[..., 1]
    scales = _fp16(d) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.25)
    return _signed(scales, IQ2_VALUES[grid("IQ2_XXS")[entries]], _with_eighth_sign(words[..., None] >> _FOUR_SEVENS))


def _iq2_xs(blocks: Bytes) -> Floats:
    words = np.ascontiguousarray(blocks[:, 2:66]).view(np.uint16)
    scales = _fp16(blocks[:, :2]) * (np.float32(0.5) + _scales(blocks[:, 66:])) * np.float32(0.25)
    return _signed(scales, IQ2_VALUES[grid("IQ2_XS")[words & 511]], _with_eighth_sign(words >> 9))


def _iq2_s(blocks: Bytes) -> Floats:
    low, signs, high = blocks[:, 2:34], blocks[:, 34:66], _unfold(blocks[:, 66:74], _FOUR_CRUMBS) & 3
    scales = _fp16(blocks[:, :2]) * (np.float32(0.5) + _scales(blocks[:, 74:])) * np.float32(0.25)
    return _signed(scales, IQ2_VALUES[grid("IQ2_S")[low | high.astype(np.intp) << 8]], signs)


def _iq3_xxs(blocks: Bytes) -> Floats:
    words = np.ascontiguousarray(blocks[:, 66:]).view(np.uint32)
    scales = _fp16(blocks[:, :2]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    values = IQ3_XXS_VALUES[grid("IQ3_XXS")[blocks[:, 2:66]]]
    return _signed(scales, values, _with_eighth_sign(words[..., None] >> _FOUR_SEVENS))


def _iq3_s(blocks: Bytes) -> Floats:
    low, high, signs = blocks[:, 2:66], np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little"), blocks[:, 74:106]
    scales = _fp16(blocks[:, :2]) * (1 + 2 * _scales(blocks[:, 106:]))
    return _signed(scales, IQ3_S_VALUES[grid("IQ3_S")[low | high.astype(np.intp) << 8]], signs)


def _iq1_s(blocks: Bytes) -> Floats:
    low, words = blocks[:, 2:34], np.ascontiguousarray(blocks[:, 34:]).view(np.uint16)
    high = _unfold(words, _FOUR_THREES) & 7
    scales = _fp16(blocks[:, :2]) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    delta = np.repeat(np.where(words >> 15, -DELTA, DELTA), 32, axis=1)
    values = IQ1_VALUES[grid("IQ1")[low | high.astype(np.intp) << 8]].reshape(-1, 256) + delta
    return _grouped(scales, values)


def _iq1_m(blocks: Bytes) -> Floats:
    low, nibbles = blocks[:, :32], _unfold(blocks[:, 32:48], _TWO_NIBBLES) & 15
    words = np.ascontiguousarray(blocks[:, 48:]).view(np.uint16)
    # The super-scale is in the top bits of four words, the lowest first.
    top = ((words >> 12) << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, keepdims=True, dtype=np.uint16)
    scales = top.view(np.float16).astype(np.float32) * (2 * (_unfold(words, _FOUR_THREES) & 7) + 1).astype(np.float32)
    delta = np.repeat(np.where(nibbles & 8, -DELTA, DELTA), 8, axis=1)
    entries = low | (nibbles & 7).astype(np.intp) << 8
    return _grouped(scales, IQ1_VALUES[grid("IQ1")[entries]].reshape(-1, 256) + delta)


def _fp16(field: Bytes) -> Floats:
    """fp16 [n, 2 bytes] -> [n, 1]"""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def _unfold(words: NDArray[np.unsignedinteger], shifts: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
    """Every word shifted by each of `shifts`: [n, w] -> [n, w * shifts]. Higher bits are not masked."""
    return (words[..., None] >> shifts).reshape(len(words), -1)


def _scales(field: Bytes) -> Floats:
    """Nibbles, the low ones first: [n, b] -> [n, 2 b]"""
    return (_unfold(field, _TWO_NIBBLES) & 15).astype(np.float32)


def _with_eighth_sign(words: NDArray[np.integer]) -> Bytes:
    """Seven signs are stored, and the eighth makes the number of negative ones even: [n, ...] -> [n, bytes]"""
    signs: Bytes = _EIGHT_SIGNS[words & 127].reshape(len(words), -1)
    return signs


def _signed(scales: Floats, magnitudes: Floats, signs: Bytes) -> Floats:
    """[n, groups], [n, entries, digits], [n, 32 bytes] -> [n, 256]"""
    negative = np.unpackbits(signs, axis=1, bitorder="little").astype(bool)
    values = magnitudes.reshape(-1, 256)
    return _grouped(scales, np.where(negative, -values, values))


def _grouped(scales: Floats, values: Floats) -> Floats:
    """Every group of values times its scale: [n, groups], [n, 256] -> [n, 256]"""
    groups = values.reshape(*scales.shape, -1)
    return (scales[:, :, None] * groups).reshape(values.shape)


DEQUANTIZE_GRIDS: dict[str, Callable[[Bytes], Floats]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
