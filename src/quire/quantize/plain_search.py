"""The searches of `search.py` in numpy: their specification, to the bit.

Groups are transposed: the sums over a group are then taken value after value, as the compiled searches do."""

import numpy as np
from numpy.typing import NDArray

from quire.quantize.search import (
    BOOK_RANGES,
    Floats,
    inverse,
    nonzero_fp16,
    offset_factors,
    rounded,
    symmetric_factors,
)


def symmetric_scales(x: Floats, weights: Floats, levels: int) -> Floats:
    x, weights = x.T.copy(), weights.T.copy()
    best, scales = np.full(x.shape[1], -1, np.float32), np.zeros(x.shape[1], np.float32)
    over = inverse(_largest(x))
    for factor in symmetric_factors(levels):
        q = rounded(x * (factor * over), -levels, levels - 1)
        best, scales = _refitted(x, weights, q, best, scales)
    return scales[:, None]


def codebook_scales(x: Floats, weights: Floats, codebook: Floats) -> Floats:
    x, weights = x.T.copy(), weights.T.copy()
    best, scales = np.full(x.shape[1], -1, np.float32), np.zeros(x.shape[1], np.float32)
    over = inverse(_largest(x))
    middles = (codebook[1:] + codebook[:-1]) / np.float32(2)
    for factor in BOOK_RANGES.astype(np.float32):
        entries = codebook[np.searchsorted(middles, x * (factor * over))]
        best, scales = _refitted(x, weights, entries, best, scales)
    return scales[:, None]


def _largest(x: Floats) -> Floats:
    low, high = x.min(0), x.max(0)
    largest: Floats = np.where(-low > high, low, high)
    return largest


def _refitted(x: Floats, weights: Floats, q: Floats, best: Floats, scales: Floats) -> tuple[Floats, Floats]:
    """The gains and scales, improved where x is nearer to a multiple of q."""
    product = _total(weights * x * q)
    scale = product * inverse(_total(weights * (q * q)))
    gain = product * scale  # the squared error is sum(weights * x * x) less this
    return np.where(gain > best, gain, best), np.where(gain > best, scale, scales)


def offset_scales(x: Floats, weights: Floats, levels: int, *, free: bool = False) -> tuple[Floats, Floats]:
    x, weights = x.T.copy(), weights.T.copy()
    low, high = x.min(0), x.max(0)
    if not free:
        low = np.minimum(low, 0)
    scales, offsets = (high - low) / np.float32(levels), low
    over, weighted = inverse(high - low), weights * x
    sum_w, sum_x = _total(weights), _total(weighted)
    best: Floats | None = None
    for factor in offset_factors(levels):
        q = rounded((x - low) * (factor * over), 0, levels)
        sum_xq, sum_q, sum_qq = _total(weighted * q), _total(weights * q), _total(weights * q * q)
        scale, offset = scales, offsets
        if best is not None:
            determinant = inverse(sum_w * sum_qq - sum_q * sum_q)
            scale = (sum_w * sum_xq - sum_x * sum_q) * determinant
            offset = (sum_qq * sum_x - sum_q * sum_xq) * determinant
            if not free:
                scale = np.where(offset > 0, sum_xq * inverse(sum_qq), scale)
                offset = np.minimum(offset, 0)
        # The weighted squared error less sum(weights * x * x), which all candidates share.
        loss = scale * scale * sum_qq + offset * offset * sum_w
        loss = loss + 2 * (scale * offset * sum_q - scale * sum_xq - offset * sum_x)
        if best is None:
            best = loss
            continue
        better = (loss < best) & (scale > 0)
        best, scales, offsets = (
            np.where(better, new, old) for new, old in ((loss, best), (scale, scales), (offset, offsets))
        )
    return scales[:, None], offsets[:, None]


def shrunk_scales(
    x: Floats, weights: Floats, widest: Floats, zeros: Floats, levels: int, shrinks: Floats
) -> NDArray[np.float16]:
    x, weights = x.T.copy(), weights.T.copy()
    wide, zero = widest.reshape(-1), zeros.reshape(-1)
    best, chosen = np.full(x.shape[1], np.inf, np.float32), nonzero_fp16(wide)
    for shrink in shrinks:
        stored = nonzero_fp16(wide * shrink)
        scale = stored.astype(np.float32)
        error = (rounded(x * inverse(scale) + zero, 0, levels) - zero) * scale - x
        loss = _total(weights * (error * error))
        best, chosen = np.where(loss < best, loss, best), np.where(loss < best, stored, chosen)
    return chosen[:, None]


def nearest_in_grid(x: Floats, weights: Floats, values: Floats, halves: NDArray[np.uint8]) -> NDArray[np.int32]:
    errors = x[:, :, None] - values
    costs = weights[:, :, None] * (errors * errors)  # [n, digits, base]
    half = x.shape[1] // 2
    low, high = (_combined(costs[:, part]) for part in (slice(0, half), slice(half, None)))
    nearest: NDArray[np.int32] = (low[:, halves[:, 0]] + high[:, halves[:, 1]]).argmin(1).astype(np.int32)
    return nearest


def _combined(costs: Floats) -> Floats:
    """[n, digits, base] -> [n, base ^ digits], the first digit the least significant."""
    total = costs[:, 0]
    for digit in range(1, costs.shape[1]):
        total = (total[:, None, :] + costs[:, digit, :, None]).reshape(len(costs), -1)
    return total


def _total(terms: Floats) -> Floats:
    """[size, groups] -> [groups], value after value."""
    total: Floats = np.zeros(terms.shape[1], np.float32)
    for term in terms:
        total = total + term
    return total
