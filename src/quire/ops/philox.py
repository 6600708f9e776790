"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): random numbers as a function.

The plain Python version of native/src/philox.h. There is no state to save, fork or lose: the random number of a token
depends on the seed, the sample and the position alone."""

from typing import Any

MASK32 = 0xFFFFFFFF
UNIFORM_BITS = 53


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """128 random bits for a 128-bit counter and a 64-bit key, in 32-bit words, the lowest first. Words of the counter
    are ints, or uint64 arrays; the words of the result are of the same kind."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK32, (a >> 32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def random_bits(seed: int, position: int, sample: int) -> tuple[tuple[int, int], int]:
    """The random bits of the token at `position` in the whole sequence, prompt included: the key of the race that
    samples it (ops/race.py), and 53 bits for XTC.

    The key of Philox is the seed, a negative one in two's complement; the counter is (position, sample), 64 bits
    each."""
    w0, w1, w2, w3 = philox4x32((position & MASK32, position >> 32, sample, 0), (seed & MASK32, seed >> 32 & MASK32))
    return (int(w0), int(w1)), int(w3 << 32 | w2) >> 64 - UNIFORM_BITS
