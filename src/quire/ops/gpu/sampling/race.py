# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The race that picks a token, on the device: ops/race.py, in Triton.

Kernels that race are launched with `enable_fp_fusion=False`: fp64 operations are rounded one by one."""

import triton
import triton.language as tl

from quire.ops.gpu.sampling.philox import MASK32, random_word

NEVER = tl.constexpr(0x7FF0000000000000)  # the bits of infinity


@triton.jit
def _mix(x):
    """uint64 [n], below 2**32"""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


@triton.jit
def _log(x):
    """fp64 [n], normal numbers in (0, 1)"""
    bits = x.to(tl.int64, bitcast=True)
    e = (bits >> 52) - 1023
    m = ((bits & 0xFFFFFFFFFFFFF) | (1023 << 52)).to(tl.float64, bitcast=True)
    is_upper = m > 1.4142135623730951
    e, m = tl.where(is_upper, e + 1, e), tl.where(is_upper, m * 0.5, m)
    f = m - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = z * (2.0 / 19.0) + 2.0 / 17.0
    series = series * z + 2.0 / 15.0
    series = series * z + 2.0 / 13.0
    series = series * z + 2.0 / 11.0
    series = series * z + 2.0 / 9.0
    series = series * z + 2.0 / 7.0
    series = series * z + 2.0 / 5.0
    series = series * z + 2.0 / 3.0
    return e.to(tl.float64) * 0.6931471805599453 + (series * z * s + s * 2.0)


@triton.jit
def exponential(word, ids):
    """The numbers of tokens `ids`, with the 64 random bits of their position."""
    k0, k1 = word & MASK32, word >> 32
    mixed = _mix((ids.to(tl.uint64) + k0) & MASK32)
    high, low = _mix(mixed ^ k1), _mix((mixed * 0x9E3779B1 + k1) & MASK32)
    odd = (high << 21) | ((low >> 12) << 1) | 1
    return -_log(1.0 - odd.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16)  # 2**-53


@triton.jit
def finish_times(seed, position, sample, ids, weight, runs):
    """When each token that runs finishes, as the bits of fp64 numbers: they compare as these do. NEVER: it does not"""
    runs = runs & (weight > 0)
    time = exponential(random_word(seed, position, sample), ids) / tl.where(runs, weight, 1).to(tl.float64)
    return tl.where(runs, time.to(tl.int64, bitcast=True), NEVER)
