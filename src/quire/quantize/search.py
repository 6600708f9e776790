"""Scales and offsets that lose least: several ranges are tried, each refitted by weighted least squares.

Values are [groups, size], and so are their weights: how much an error of each value counts. A group whose values are
all zero gets a scale of 0."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

RANGES = np.arange(-9, 10) / 10  # of symmetric types: levels that the largest value is moved by
WIDTHS = np.arange(-1.0, 1.01, 0.2)  # of types with an offset: levels that the range is widened by
CHUNK_VALUES = 1 << 14  # searched at once, so that all arrays stay in a core's cache


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


def symmetric_scales(x: Floats, weights: Floats, levels: int) -> Floats:
    """-> [groups, 1]: x is about scale * q, q from -levels to levels - 1. The value of the largest magnitude gets a
    negative q, so a scale may be negative."""
    scales = [_symmetric(a, w, levels) for a, w in _chunks(x, weights)]
    return np.concatenate(scales)[:, None]


def offset_scales(x: Floats, weights: Floats, levels: int, *, free: bool = False) -> tuple[Floats, Floats]:
    """-> scales and offsets [groups, 1]: x is about scale * q + offset, q from 0 to `levels`. Unless `free`, the offset
    is not above 0."""
    pairs = [_offset(a, w, levels, free) for a, w in _chunks(x, weights)]
    scales, offsets = (np.concatenate(part)[:, None] for part in zip(*pairs, strict=True))
    return scales, offsets


def _chunks(x: Floats, weights: Floats) -> list[tuple[Floats, Floats]]:
    """Transposed: sums over a group are then sums of long rows."""
    step = max(CHUNK_VALUES // x.shape[1], 1)
    cuts = range(0, len(x), step)
    return [tuple(np.ascontiguousarray(part[cut : cut + step].T) for part in (x, weights)) for cut in cuts]  # type: ignore[misc]


def _symmetric(x: Floats, weights: Floats, levels: int) -> Floats:
    low, high = x.min(0), x.max(0)
    over = inverse(np.where(-low > high, low, high))
    weighted, scratch = weights * x, np.empty_like(x)
    best, scales = np.full_like(over, -1), np.zeros_like(over)
    for step in RANGES:
        q = rounded(np.multiply(x, np.float32(-(levels + step)) * over, out=scratch), -levels, levels - 1)
        product = np.multiply(weighted, q, out=scratch).sum(0)
        np.multiply(q, q, out=q)
        scale = product * inverse(np.multiply(weights, q, out=scratch).sum(0))
        gain = product * scale  # the squared error is sum(weights * x * x) less this
        better = gain > best
        np.copyto(best, gain, where=better)
        np.copyto(scales, scale, where=better)
    return scales


def _offset(x: Floats, weights: Floats, levels: int, free: bool) -> tuple[Floats, Floats]:
    low, high = x.min(0), x.max(0)
    if not free:
        low = np.minimum(low, 0)
    scales, offsets = (high - low) / np.float32(levels), low.copy()
    over, above = inverse(high - low), x - low
    weighted, scratch = weights * x, np.empty_like(x)
    sum_w, sum_x = weights.sum(0), weighted.sum(0)
    best = None
    for step in (None, *WIDTHS):
        reach = np.float32(levels + (step or 0))
        q = rounded(np.multiply(above, reach * over, out=scratch), 0, levels)
        sum_xq = np.multiply(weighted, q, out=scratch).sum(0)
        wq = np.multiply(weights, q, out=scratch)
        sum_q = wq.sum(0)
        sum_qq = np.multiply(wq, q, out=q).sum(0)
        if step is None:
            scale, offset = scales, offsets
        else:
            determinant = inverse(sum_w * sum_qq - sum_q * sum_q)
            scale = (sum_w * sum_xq - sum_x * sum_q) * determinant
            offset = (sum_qq * sum_x - sum_q * sum_xq) * determinant
            if not free:
                scale = np.where(offset > 0, sum_xq * inverse(sum_qq), scale)
                offset = np.minimum(offset, 0)
        # The weighted squared error less sum(weights * x * x), which all candidates share.
        loss = scale * scale * sum_qq + offset * offset * sum_w
        loss += 2 * (scale * offset * sum_q - scale * sum_xq - offset * sum_x)
        if best is None:
            best = loss
            continue
        better = (loss < best) & (scale > 0)
        np.copyto(best, loss, where=better)
        np.copyto(scales, scale, where=better)
        np.copyto(offsets, offset, where=better)
    return scales, offsets
