# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Philox4x32-10 on the device: ops/philox.py, in Triton."""

import triton
import triton.language as tl

MASK32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def random_word(seed, position, sample):
    """int64 scalars -> 64 random bits as uint64. 32-bit words are multiplied in 64 bits."""
    k0, k1 = seed.to(tl.uint64) & MASK32, seed.to(tl.uint64) >> 32
    c0, c1 = position.to(tl.uint64) & MASK32, position.to(tl.uint64) >> 32
    c2 = sample.to(tl.uint64)
    c3 = c2 - c2
    for _ in tl.static_range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (b >> 32) ^ c1 ^ k0, b & MASK32
        c2, c3 = (a >> 32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return (c1 << 32) | c0


@triton.jit
def watermark_word(key, before, ids):
    """The 32 random bits of tokens `ids` after the token `before`, which make them green or not. See
    ops/watermark.py"""
    k0, k1 = key.to(tl.uint64) & MASK32, key.to(tl.uint64) >> 32
    c1 = (ids // 4).to(tl.uint64)
    c2 = c1 - c1
    c0, c3 = c2 + before.to(tl.uint64), c2 + 1
    for _ in tl.static_range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (b >> 32) ^ c1 ^ k0, b & MASK32
        c2, c3 = (a >> 32) ^ c3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return tl.where(ids % 4 < 2, tl.where(ids % 2 == 0, c0, c1), tl.where(ids % 2 == 0, c2, c3))
