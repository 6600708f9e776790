# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Scales and offsets of the groups of a chunk: loaded as they lie in memory, then one after the other as fp32.

Scales have far to come, so all of a chunk are asked for before its words. Where they lie together they come four or
eight bytes at a time. A byte is placed into the mantissa of a large float (2**23 + 128 + byte) and the large number
subtracted, as a conversion would take longer, and six bits likewise; times its unit it is exact."""

import triton
import triton.language as tl

LARGE = tl.constexpr(8388736.0)
LARGE_BITS = tl.constexpr(0x4B000080)


@triton.jit
def load_scales(
    scale_ptr,
    offset_ptr,
    super_scale_ptr,
    chunk,
    rows,
    N,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """-> what `scale_of` and `offset_of` take. CHUNK: its inputs."""
    scales, offsets, super_scales = (), (), ()
    GROUPS: tl.constexpr = max(CHUNK // GROUP, 1)
    if scale_ptr.dtype.element_ty.is_floating():
        for number in tl.static_range(GROUPS):
            place = (chunk * CHUNK // GROUP + number) * N + rows
            scales = append(scales, tl.load(scale_ptr + place))
            if HAS_OFFSETS:
                offsets = append(offsets, tl.load(offset_ptr + place))
    else:
        LONG: tl.constexpr = scale_ptr.dtype.element_ty == tl.int64
        BITS: tl.constexpr = 16 if super_scale_ptr is None else (8 if LONG else 6)
        WORDS: tl.constexpr = GROUPS * (2 if HAS_OFFSETS else 1) * BITS // (64 if LONG else 32)
        if super_scale_ptr is not None:
            super_scales = append(super_scales, tl.load(super_scale_ptr + chunk * CHUNK // 256 * N + rows))
        place = chunk * CHUNK // max(CHUNK, GROUP) * N + rows
        for number in tl.static_range(WORDS):
            scales = append(scales, tl.load(scale_ptr + place * WORDS + number))
        if BITS == 6:
            scales = as_bytes(scales)
        if HAS_OFFSETS:
            offsets = scales
    return scales, offsets, super_scales


@triton.jit
def scale_of(loaded, NUMBER: tl.constexpr):
    """Of the chunk's group of that number, fp32."""
    return _number(loaded, NUMBER, 0)


@triton.jit
def offset_of(loaded, NUMBER: tl.constexpr):
    return _number(loaded, NUMBER, 1)


@triton.jit
def _number(loaded, NUMBER: tl.constexpr, OFFSET: tl.constexpr):
    scales, offsets, super_scales = loaded
    STEP: tl.constexpr = 1 if len(offsets) == 0 else 2
    PLACE: tl.constexpr = NUMBER * STEP + OFFSET  # among those that lie together
    if scales[0].dtype.is_floating():
        number = (offsets if OFFSET else scales)[NUMBER].to(tl.float32)
    elif len(super_scales) == 0:
        HALVES: tl.constexpr = scales[0].dtype.primitive_bitwidth // 16
        number = half(scales[PLACE // HALVES], PLACE % HALVES * 16)
    else:
        if scales[0].dtype == tl.int32:
            number = byte(scales[OFFSET * 2 + NUMBER // 4], NUMBER % 4)
        else:
            number = byte(scales[PLACE // 8], PLACE % 8)
        if STEP == 1:
            number *= super_scales[0]
        elif OFFSET:
            number *= -half(super_scales[0], 16)
        else:
            number *= half(super_scales[0], 0)
    return number


@triton.jit
def byte(word, PLACE: tl.constexpr):
    """A signed byte of an integer, as fp32"""
    bits = (word >> (8 * PLACE)).to(tl.int32) & 255
    return (bits ^ LARGE_BITS).to(tl.float32, bitcast=True) - LARGE


@triton.jit
def as_bytes(words):
    """Six bits of eight scales and offsets (see `quant_layout`) -> scales 0 .. 3, 4 .. 7, offsets 0 .. 3, 4 .. 7"""
    scales, offsets, rest = words
    return (
        scales & 0x3F3F3F3F,
        rest & 0x0F0F0F0F | scales >> 2 & 0x30303030,
        offsets & 0x3F3F3F3F,
        rest >> 4 & 0x0F0F0F0F | offsets >> 2 & 0x30303030,
    )


@triton.jit
def half(word, SHIFT: tl.constexpr):
    """An fp16 in an int32 or int64, as fp32"""
    return (word >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005 (the compiler knows no other way)
