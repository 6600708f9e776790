# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""How logits are ordered, and their softmax weights. Specification: ops/reference/sampler.py

A weight is round(2**44 * exp((logit - max) / temperature)), made of fp64 multiplications and additions that are rounded
one by one: kernels that compute weights are launched with `enable_fp_fusion=False`, so that none is contracted into a
fused multiply-add. So the integers, all their sums and the sampled token are those of every other sampler."""

import triton
import triton.language as tl

from quire.ops.gpu.sampling.job import MAX_TILES

MAX_WEIGHT = tl.constexpr(float(1 << 44))  # of the most likely token
MIN_DISTANCE = tl.constexpr(-32.0)  # a token this far below weighs 0
FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
NEG_INF_KEY = tl.constexpr(-2139095041)  # ordered_key(-inf)
MAX_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def ordered_key(x):
    """fp32 -> int32 that compare as the logits do. Both zeros have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """The inverse of `ordered_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack(x, ids):
    """(logit, id) as one int64: the greatest is the greatest logit, among equals the lowest id."""
    return (ordered_key(x).to(tl.int64) << 32) | (ids ^ MAX_ID).to(tl.int64)


@triton.jit
def unpack_key(pair):
    return (pair >> 32).to(tl.int32)


@triton.jit
def unpack_id(pair):
    return (pair & MAX_ID).to(tl.int32) ^ MAX_ID


@triton.jit
def load_tiles(values, line, num_tiles, other):
    """The values of a line's tiles: [MAX_TILES]"""
    tiles = tl.arange(0, MAX_TILES)
    return tl.load(values + line * num_tiles + tiles, mask=tiles < num_tiles, other=other)


@triton.jit
def line_max(tile_maxima, line, num_tiles):
    """The greatest of a line's tile maxima, packed."""
    return tl.max(load_tiles(tile_maxima, line, num_tiles, -(1 << 63)), axis=0)


@triton.jit
def finite_max(pair):
    """The logit that distances are measured from, in fp32. (Lines that are sampled from have a finite logit.)"""
    return tl.clamp(logit_of(unpack_key(pair)), -FLOAT_MAX, FLOAT_MAX)


@triton.jit
def softmax_weight(x, max_logit, inverse_temperature):
    """x [n] fp32, max_logit fp32 the greatest of them (finite), inverse_temperature fp64 -> [n] int64"""
    distance = (tl.minimum(x, FLOAT_MAX).to(tl.float64) - max_logit.to(tl.float64)) * inverse_temperature
    distance = tl.maximum(distance, MIN_DISTANCE)
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
    return (scaled + 4503599627370496.0).to(tl.int64, bitcast=True) & 0xFFFFFFFFFFFFF  # 2**52: rounds to an integer
