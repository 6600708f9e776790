# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Scales and offsets of the groups of a chunk: loaded as they lie in memory, then one after the other as fp32.

Scales have far to come, so all of a chunk are asked for before its words. Those of two levels come eight bytes at a
time. A byte is placed into the mantissa of a large float (2**23 + 128 + byte) and the large number subtracted, as a
conversion would take longer; times its unit it is exact."""

import triton
import triton.language as tl

LARGE = tl.constexpr(8388736.0)
LARGE_BITS = tl.constexpr(0x4B000080)


@triton.jit
def load_scales(scale_ptr, offset_ptr, unit_ptr, chunk, rows, N, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """-> what `scale_of` and `offset_of` take. CHUNK: its inputs."""
    scales, offsets, units = (), (), ()
    if unit_ptr is None:
        for number in tl.static_range(max(CHUNK // GROUP, 1)):
            place = (chunk * CHUNK // GROUP + number) * N + rows
            scales = appended(scales, tl.load(scale_ptr + place))
            if offset_ptr is not None:
                offsets = appended(offsets, tl.load(offset_ptr + place))
    else:
        units = appended(units, tl.load(unit_ptr + chunk * CHUNK // 256 * N + rows))
        WORDS: tl.constexpr = CHUNK // GROUP // (4 if units[0].dtype == tl.int32 else 8)
        for number in tl.static_range(WORDS):
            scales = appended(scales, tl.load(scale_ptr + (chunk * N + rows) * WORDS + number))
    return scales, offsets, units


@triton.jit
def scale_of(loaded, NUMBER: tl.constexpr):
    """Of the chunk's group of that number, fp32."""
    scales, _, units = loaded
    if len(units) == 0:
        scale = scales[NUMBER].to(tl.float32)
    elif units[0].dtype == tl.int32:
        scale = half(units[0], 0) * byte(scales[NUMBER // 4], NUMBER % 4 * 2)
    else:
        scale = units[0] * byte(scales[NUMBER // 8], NUMBER % 8)
    return scale


@triton.jit
def offset_of(loaded, NUMBER: tl.constexpr):
    scales, offsets, units = loaded
    if len(units) == 0:
        offset = offsets[NUMBER].to(tl.float32)
    else:
        offset = -half(units[0], 16) * byte(scales[NUMBER // 4], NUMBER % 4 * 2 + 1)
    return offset


@triton.jit
def byte(word, PLACE: tl.constexpr):
    """A signed byte of an int64, as fp32"""
    bits = (word >> (8 * PLACE)).to(tl.int32) & 255
    return (bits ^ LARGE_BITS).to(tl.float32, bitcast=True) - LARGE


@triton.jit
def half(word, SHIFT: tl.constexpr):
    """An fp16 in an int32, as fp32"""
    return (word >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def appended(values, value):
    return values + (value,)  # noqa: RUF005 (the compiler knows no other way)
