"""Scales and offsets that lose least: several ranges are tried, each refitted by weighted least squares.

Values are [groups, size], and so are their weights: how much an error of each value counts. A group whose values are
all zero gets a scale of 0. The searches are compiled (native/src/search.h); `plain_search.py` says the same in numpy,
to the bit."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.compiled import native

Floats = NDArray[np.float32]

RANGES = np.arange(-9, 10) / 10  # of symmetric types: levels that the largest value is moved by
WIDTHS = np.array([0.0, *np.arange(-1.0, 1.01, 0.2)])  # of types with an offset: levels that the range is widened by
BOOK_RANGES = np.arange(-7, 8) - 127.0  # of IQ4's codebook: what the largest value is moved to
SMALLEST_SCALE = np.float16(6e-5)  # groups of zeros keep a scale: readers divide by it
MAX_FP16 = np.float32(65504)


def to_fp16(values: NDArray[Any]) -> NDArray[np.float16]:
    stored: NDArray[np.float16] = np.clip(values, -MAX_FP16, MAX_FP16).astype(np.float16)
    return stored


def nonzero_fp16(scales: Floats) -> NDArray[np.float16]:
    stored = to_fp16(scales)
    return np.where(stored == 0, SMALLEST_SCALE, stored)


def inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 where that is 0 or too small to be inverted."""
    with np.errstate(divide="ignore", over="ignore"):
        inverted: Floats = np.float32(1) / scale
    inverted[~np.isfinite(inverted)] = 0
    return inverted


def rounded(values: Floats, low: int, high: int) -> Floats:
    whole: Floats = np.rint(values)
    np.clip(whole, low, high, out=whole)
    return whole


def largest_magnitude(x: Floats) -> Floats:
    """[groups, size] -> [groups, 1], with its sign"""
    low, high = x.min(1, keepdims=True), x.max(1, keepdims=True)
    largest: Floats = np.where(-low > high, low, high)
    return largest


def symmetric_factors(levels: int) -> Floats:
    return (-(levels + RANGES)).astype(np.float32)


def offset_factors(levels: int) -> Floats:
    return (levels + WIDTHS).astype(np.float32)


def symmetric_scales(x: Floats, weights: Floats, levels: int) -> Floats:
    """-> [groups, 1]: x is about scale * q, q from -levels to levels - 1. The value of the largest magnitude gets a
    negative q, so a scale may be negative."""
    scales: Floats = native.search_symmetric(*_groups(x, weights), symmetric_factors(levels), levels)
    return scales[:, None]


def offset_scales(x: Floats, weights: Floats, levels: int, *, free: bool = False) -> tuple[Floats, Floats]:
    """-> scales and offsets [groups, 1]: x is about scale * q + offset, q from 0 to `levels`. Unless `free`, the offset
    is not above 0."""
    scales, offsets = native.search_offset(*_groups(x, weights), offset_factors(levels), levels, free)
    return scales[:, None], offsets[:, None]


def shrunk_scales(
    x: Floats, weights: Floats, widest: Floats, zeros: Floats, levels: int, shrinks: Floats
) -> NDArray[np.float16]:
    """-> [groups, 1]: x is about scale * (q - zero), q from 0 to `levels`; the best of the scales shrink * widest.
    `widest` and `zeros`: [groups, 1]"""
    per_group = (np.ascontiguousarray(part, np.float32).reshape(-1) for part in (widest, zeros))
    scales: Floats = native.search_shrunk(*_groups(x, weights), *per_group, shrinks, levels)
    return scales[:, None].astype(np.float16)


def codebook_scales(x: Floats, weights: Floats, codebook: Floats) -> Floats:
    """-> [groups, 1]: x is about scale * an entry of the codebook, 16 numbers in ascending order."""
    scales: Floats = native.search_codebook(*_groups(x, weights), BOOK_RANGES.astype(np.float32), codebook)
    return scales[:, None]


def nearest_in_grid(x: Floats, weights: Floats, values: Floats, halves: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The entry of a grid that is nearest to each vector x [n, digits], by weighted squared error. Digit k of an entry
    stands for values[k]; `halves` [entries, 2] has the numbers that the digits of its two halves make."""
    entries: NDArray[np.int32] = native.nearest_in_grid(*_groups(x, weights), values, halves)
    return entries


def _groups(x: Floats, weights: Floats) -> tuple[Floats, Floats]:
    return np.ascontiguousarray(x, np.float32), np.ascontiguousarray(weights, np.float32)
