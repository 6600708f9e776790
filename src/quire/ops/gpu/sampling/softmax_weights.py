# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""How logits are ordered and weighed. Spec: ops/reference/sampler.py

A weight is round(2**44 * exp((logit - greatest) / temperature)), made of fp64 multiplications and additions that are
rounded one by one: kernels that weigh are launched with `enable_fp_fusion=False`, so that no device contracts two of
them into one. Then the integers, and with them all sums and the drawn token, are those of every other sampler."""

import triton
import triton.language as tl

from quire.ops.gpu.sampling.job import MAX_TILES

ONE = tl.constexpr(float(1 << 44))  # what the most likely token weighs
FLOOR = tl.constexpr(-32.0)  # whatever lies this far below weighs 0
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NOTHING = tl.constexpr(-2139095041)  # ordered(-inf)
LAST_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered(x):
    """fp32 -> int32 that compare as the logits do. Zero has one sign."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """The inverse of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def packed(x, ids):
    """(logit, id) as one int64: the greatest is the greatest logit, among equals the one with the lowest id."""
    return (ordered(x).to(tl.int64) << 32) | (ids ^ LAST_ID).to(tl.int64)


@triton.jit
def packed_key(pair):
    return (pair >> 32).to(tl.int32)


@triton.jit
def packed_id(pair):
    return (pair & LAST_ID).to(tl.int32) ^ LAST_ID


@triton.jit
def load_tiles(of_tiles, line, num_tiles, other):
    """What is known of each tile of a line: [MAX_TILES]"""
    tiles = tl.arange(0, MAX_TILES)
    return tl.load(of_tiles + line * num_tiles + tiles, mask=tiles < num_tiles, other=other)


@triton.jit
def greatest_of_tiles(peaks, line, num_tiles):
    """The greatest of a line's packed peaks."""
    return tl.max(load_tiles(peaks, line, num_tiles, -(1 << 63)), axis=0)


@triton.jit
def finite_peak(pair):
    """The logit that distances are measured from: fp32. (There is no -inf among those that are drawn from.)"""
    return tl.clamp(logit_of(packed_key(pair)), -FLOAT_MAX, FLOAT_MAX)


@triton.jit
def weigh(x, peak, inverse_temperature):
    """x [n] fp32, peak fp32 the greatest of them (finite), inverse_temperature fp64 -> [n] int64"""
    distance = (tl.minimum(x, FLOAT_MAX).to(tl.float64) - peak.to(tl.float64)) * inverse_temperature
    distance = tl.maximum(distance, FLOOR)
    shifted = distance * 1.4426950408889634 + 6755399441055744.0  # 1.5 * 2**52: rounds to an integer, in the low bits
    r = distance - (shifted - 6755399441055744.0) * 0.6931471805599453  # |r| <= ln(2) / 2
    e = r * (1.0 / 362880.0) + 1.0 / 40320.0
    e = e * r + 1.0 / 5040.0
    e = e * r + 1.0 / 720.0
    e = e * r + 1.0 / 120.0
    e = e * r + 1.0 / 24.0
    e = e * r + 1.0 / 6.0
    e = e * r + 0.5
    e = e * r + 1.0
    e = e * r + 1.0
    power = (shifted.to(tl.int64, bitcast=True) & 0xFFF) + 44  # modulo 2**12, as the addition to an exponent is
    scaled = (e.to(tl.int64, bitcast=True) + (power << 52)).to(tl.float64, bitcast=True)  # e * 2 ** power
    return (scaled + 4503599627370496.0).to(tl.int64, bitcast=True) & 0xFFFFFFFFFFFFF  # 2**52: likewise
