# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Scales and offsets of the groups of a chunk: loaded as they lie in memory, then converted to fp32 one by one.

Loads take long, so all scales of a chunk are loaded before its words. Where they lie together they come four or eight
bytes index a time. A byte, or six bits, is placed into the mantissa of a large float (2**23 + 128 + byte) and the large
number subtracted, which is faster than a conversion; times its super-scale it is exact. An exponent has its place in a
float already."""

import triton
import triton.language as tl

from quire.ops.gpu.linear.exponents import OF_BITS

LARGE = tl.constexpr(8388736.0)
LARGE_BITS = tl.constexpr(0x4B000080)
POWER = tl.constexpr(OF_BITS)


@triton.jit
def load_scales(w, chunk, rows, N, GROUP: tl.constexpr, CHUNK: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """w: GroupedArgs, CHUNK: inputs of a chunk -> what `scale_of`, `offset_of` and `zeros_of` take. Zero points lie
    where offsets do."""
    scales, offsets, super_scales = (), (), ()
    GROUPS: tl.constexpr = max(CHUNK // GROUP, 1)
    if w.scales.dtype.element_ty.is_floating():
        for number in tl.static_range(GROUPS):
            index = (chunk * CHUNK // GROUP + number) * N + rows
            scales = append(scales, tl.load(w.scales + index))
            if HAS_OFFSETS:
                offsets = append(offsets, tl.load(w.offsets + index))
    else:
        LONG: tl.constexpr = w.scales.dtype.element_ty == tl.int64
        ALONE: tl.constexpr = 8 if w.scales.dtype.element_ty == tl.uint32 else 16  # exponents, fp16
        BITS: tl.constexpr = ALONE if w.super_scales is None else (8 if LONG else 6)
        WORDS: tl.constexpr = GROUPS * (2 if HAS_OFFSETS else 1) * BITS // (64 if LONG else 32)
        if w.super_scales is not None:
            super_scales = append(super_scales, tl.load(w.super_scales + chunk * CHUNK // 256 * N + rows))
        index = chunk * CHUNK // max(CHUNK, GROUP) * N + rows
        for number in tl.static_range(WORDS):
            scales = append(scales, tl.load(w.scales + index * WORDS + number))
        if BITS == 6:
            scales = as_bytes(scales)
        if HAS_OFFSETS:
            offsets = scales
    return scales, offsets, super_scales


@triton.jit
def scale_of(loaded, NUMBER: tl.constexpr):
    """The scale of the chunk's group NUMBER, in fp32."""
    return _number(loaded, NUMBER, 0)


@triton.jit
def offset_of(loaded, NUMBER: tl.constexpr):
    return _number(loaded, NUMBER, 1)


@triton.jit
def zeros_of(loaded, GROUPS: tl.constexpr, ZERO: tl.constexpr):
    """The zero points of the chunk's groups, int32 each; without zero points, nothing."""
    zeros = ()
    if ZERO < 0:
        words = loaded[0]
        PER_WORD: tl.constexpr = words[0].dtype.primitive_bitwidth // 32
        for number in tl.static_range(GROUPS):
            word = words[number // PER_WORD] >> (number % PER_WORD * 32 + 16)
            zeros = append(zeros, word.to(tl.int32) & 0x7F)
    return zeros


@triton.jit
def scaled_planes(planes, loaded, GROUPS: tl.constexpr, HAS_OFFSETS: tl.constexpr):
    """Planes of values -> planes of weights, in the same 16 bits: each is computed in fp32 and rounded once."""
    scaled = ()
    for plane in tl.static_range(len(planes)):
        w = planes[plane].to(tl.float32) * scale_of(loaded, plane * GROUPS // len(planes))[:, None]
        if HAS_OFFSETS:
            w += offset_of(loaded, plane * GROUPS // len(planes))[:, None]
        scaled = append(scaled, w.to(planes[plane].dtype))
    return scaled


@triton.jit
def _number(loaded, NUMBER: tl.constexpr, OFFSET: tl.constexpr):
    scales, offsets, super_scales = loaded
    STEP: tl.constexpr = 1 if len(offsets) == 0 else 2
    INDEX: tl.constexpr = NUMBER * STEP + OFFSET  # among the numbers of a word
    if scales[0].dtype.is_floating():
        number = (offsets if OFFSET else scales)[NUMBER].to(tl.float32)
    elif scales[0].dtype == tl.uint32:
        number = power_at(scales[NUMBER // 4], NUMBER % 4)
    elif len(super_scales) == 0:
        PER_WORD: tl.constexpr = scales[0].dtype.primitive_bitwidth // 16
        number = fp16_at(scales[INDEX // PER_WORD], INDEX % PER_WORD * 16)
    else:
        if scales[0].dtype == tl.int32:
            number = byte(scales[OFFSET * 2 + NUMBER // 4], NUMBER % 4)
        else:
            number = byte(scales[INDEX // 8], INDEX % 8)
        if STEP == 1:
            number *= super_scales[0]
        elif OFFSET:
            number *= -fp16_at(super_scales[0], 16)
        else:
            number *= fp16_at(super_scales[0], 0)
    return number


@triton.jit
def byte(word, INDEX: tl.constexpr):
    """A signed byte of an integer, as fp32"""
    bits = (word >> (8 * INDEX)).to(tl.int32) & 255
    return (bits ^ LARGE_BITS).to(tl.float32, bitcast=True) - LARGE


@triton.jit
def power_at(word, INDEX: tl.constexpr):
    """The scale of a byte of a word of exponents (exponents.py), as fp32"""
    bits = ((word >> (8 * INDEX)) & 255) << 23
    return bits.to(tl.float32, bitcast=True) * POWER


@triton.jit
def as_bytes(words):
    """Six bits of eight scales and offsets (see grouped_layout.py) -> scales 0 .. 3, 4 .. 7, offsets 0 .. 3, 4 .. 7"""
    scales, offsets, rest = words
    return (
        scales & 0x3F3F3F3F,
        rest & 0x0F0F0F0F | scales >> 2 & 0x30303030,
        offsets & 0x3F3F3F3F,
        rest >> 4 & 0x0F0F0F0F | offsets >> 2 & 0x30303030,
    )


@triton.jit
def fp16_at(word, SHIFT: tl.constexpr):
    """An fp16 in an int32 or int64, as fp32"""
    return (word >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005 (Triton has no starred tuples)
