"""The race that picks a token: every token has an exponential number of its own, and the one whose number divided by
its weight is the least wins. So it wins with the probability of its weight.

A token's number depends on the random key of its position and on its id alone: not on which other tokens survive, nor
on their weights. Two samplers with nearly the same weights mostly pick the same token. The plain version of
native/src/race.h and of ops/gpu/sampling/race.py: a hash of 32-bit words, and a logarithm of single fp64
multiplications, additions and divisions, which every device rounds alike."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.philox import MASK32

Float64 = NDArray[np.float64]
LN2 = 0.6931471805599453
SQRT2 = 1.4142135623730951
EXPONENT_BIAS = 1023


def mix(x: Any) -> Any:
    """A permutation of 32-bit words (lowbias32 of hash-prospector): each bit of x changes half of the bits. uint64 [n],
    below 2**32"""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & MASK32
    x = x ^ x >> 15
    x = x * 0x846CA68B & MASK32
    return x ^ x >> 16


def exponentials(key: tuple[int, int], ids: NDArray[np.integer[Any]]) -> Float64:
    """-log(1 - u) for each id, with u = (2v + 1) / 2**53 and 52 random bits v: 32 of one hash, 20 of another."""
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    mixed = mix(ids.astype(np.uint64) + k0 & MASK32)
    high, low = mix(mixed ^ k1), mix(mixed * 0x9E3779B1 + k1 & MASK32)
    odd = (high << np.uint64(21)) | (low >> np.uint64(12) << np.uint64(1)) | np.uint64(1)
    return -log(1.0 - odd.astype(np.float64) * 2.0**-53)


def log(x: Float64) -> Float64:
    """The logarithm of normal numbers in (0, 1), to a relative 1e-14: log(m * 2**e) = 2 atanh((m - 1) / (m + 1)) + e *
    log(2)"""
    bits = x.view(np.int64)
    e = (bits >> 52) - EXPONENT_BIAS
    m = (bits & (1 << 52) - 1 | EXPONENT_BIAS << 52).view(np.float64)  # in [1, 2)
    e, m = np.where(m > SQRT2, e + 1, e), np.where(m > SQRT2, m * 0.5, m)
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    series = np.full_like(z, 2.0 / 19.0)
    for n in range(17, 1, -2):
        series = series * z + 2.0 / n
    return e.astype(np.float64) * LN2 + (series * z * s + 2.0 * s)


def winner(key: tuple[int, int], ids: NDArray[np.integer[Any]], weights: NDArray[np.int64]) -> int:
    """The id that wins, of those with a weight above 0; of equals the lowest."""
    order = np.argsort(ids)
    ids, weights = ids[order], weights[order]
    with np.errstate(divide="ignore"):
        return int(ids[np.argmin(exponentials(key, ids) / weights.astype(np.float64))])
