# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Scales of a tile's weights for grouped_wide.py: computed once by a program and kept in shared memory.

A lane multiplies eight weights of a plane with one scale, and four lanes share a row of weights. Where groups are
small, to compute scales takes as long as that, so no lane computes what others do. A span of inputs has its groups in
two halves: of an output, a lane has the groups of one half. Of a scale two bf16 are kept, which add up to 16 of its
bits, and of a group's zero point or offset one bf16."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.ops.gpu.linear.exponents import OF_BITS
from quire.ops.gpu.linear.wide_unpack import LARGE

# A scale's main part in the lower half, the rest in the upper one.
TWO_PARTS = gl.constexpr(
    "{ .reg .b32 a; cvt.rn.bf16x2.f32 a, $1, $1; shl.b32 a, a, 16; sub.rn.f32 a, $1, a; cvt.rn.bf16x2.f32 $0, a, $1; }"
)


@gluon.constexpr_function
def num_groups(GROUP, SPAN):
    return max(SPAN // GROUP, 1)


@gluon.constexpr_function
def num_halves(GROUP, SPAN):
    return min(num_groups(GROUP, SPAN), 2)


@gluon.constexpr_function
def scale_layout(halves, warps):
    """Of [halves, outputs]."""
    across = halves if warps == 8 else 1
    return gl.BlockedLayout([1, 1], [1, 32], [across, warps // across], [1, 0])


@gluon.jit
def load_numbers(
    scales_ptr,
    offsets_ptr,
    super_ptr,
    span,
    rows,
    half,
    N,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    SPAN: gl.constexpr,
):
    """What is stored of a span's scales, for [halves, outputs]: rows [1, outputs], half [halves, 1]."""
    GROUPS: gl.constexpr = num_groups(GROUP, SPAN)
    ITEMS: gl.constexpr = GROUPS // num_halves(GROUP, SPAN)
    PER_GROUP: gl.constexpr = 1 if SECOND == "none" else 2
    numbers = ()
    if KIND == "floats":
        for item in gl.static_range(ITEMS):
            group = span * GROUPS + half * ITEMS + item if GROUP <= SPAN else half + span // (GROUP // SPAN)
            index = group.to(gl.int64) * N + rows
            numbers = append(numbers, gl.load(scales_ptr + index))
            if SECOND == "offsets":
                numbers = append(numbers, gl.load(offsets_ptr + index))
    elif KIND == "six":
        index = (gl.cast(span, gl.int64) * N + rows) * 3 + half * 0
        for number in gl.static_range(3):
            numbers = append(numbers, gl.load(scales_ptr + index + number))
    else:
        WORDS: gl.constexpr = GROUPS * PER_GROUP // PARTS // (2 if KIND == "halves" else 4)  # of a chunk
        OWN: gl.constexpr = WORDS if PARTS == 2 else max(WORDS // 2, 1)
        block = span * PARTS // max(GROUP // SPAN, 1)
        if PARTS == 2:
            index = ((block + half).to(gl.int64) * N + rows) * WORDS
        else:  # halves share a single word
            index = (gl.cast(block, gl.int64) * N + rows) * WORDS + half * (WORDS // 2)
        for number in gl.static_range(OWN):
            numbers = append(numbers, gl.load(scales_ptr + index + number))
    if KIND == "six" or KIND == "bytes":
        numbers = append(numbers, gl.load(super_ptr + gl.cast(span, gl.int64) * N + rows + half * 0))
    return numbers


@gluon.jit
def store_scales(
    numbers,
    pairs,
    others,
    half,
    buffer,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    GROUP: gl.constexpr,
    SPAN: gl.constexpr,
    OFFSET_SCALES: gl.constexpr,
):
    """pairs and others int32 [buffers, items, halves, outputs] in shared memory, for a span's numbers."""
    GROUPS: gl.constexpr = num_groups(GROUP, SPAN)
    ITEMS: gl.constexpr = GROUPS // num_halves(GROUP, SPAN)
    if KIND == "six" or KIND == "bytes":
        above = numbers[len(numbers) - 1]
        if SECOND == "offsets":
            scale_of_scales = _half_at(above, 0)
            scale_of_offsets = -_half_at(above, 16)
        else:
            scale_of_scales = above
    if KIND == "six":
        own, more, rest = numbers[0], numbers[1], numbers[2]
        scale_bytes = gl.where(half == 0, own & 0x3F3F3F3F, (rest & 0x0F0F0F0F) | ((own >> 2) & 0x30303030))
        offset_bytes = gl.where(half == 0, more & 0x3F3F3F3F, ((rest >> 4) & 0x0F0F0F0F) | ((more >> 2) & 0x30303030))
    own_pairs, own_others = (), ()
    if KIND == "exponents":
        exponents = numbers[0] >> (half * 16) if GROUPS == 4 else numbers[0]
    for item in gl.static_range(ITEMS):
        if KIND == "floats":
            scale = numbers[item * (2 if SECOND == "offsets" else 1)].to(gl.float32)
            if SECOND == "offsets":
                offset = numbers[item * 2 + 1].to(gl.float32)
        elif KIND == "exponents":
            scale = _power(exponents, item) * POWER
        elif KIND == "halves":
            if SECOND == "none":
                if ITEMS == 1 and GROUPS == 2:
                    scale = _half_at(numbers[0] >> (half * 16), 0)
                else:
                    scale = _half_at(numbers[item // 2], item % 2 * 16)
            else:
                scale = _half_at(numbers[item], 0)
                if SECOND == "offsets":
                    offset = _half_at(numbers[item], 16)
                else:
                    point = numbers[item] >> 16
        elif KIND == "six":
            scale = _byte(scale_bytes, item, False) * scale_of_scales
            offset = _byte(offset_bytes, item, False) * scale_of_offsets
        elif SECOND == "none":
            scale = _byte(numbers[item // 4], item % 4, True) * scale_of_scales
        else:
            scale = _byte(numbers[item // 2], item % 2 * 2, True) * scale_of_scales
            offset = _byte(numbers[item // 2], item % 2 * 2 + 1, True) * scale_of_offsets
        if KIND == "exponents":
            both = scale.to(gl.int32, bitcast=True) >> 16  # a bf16: a power of two has no rest
        else:
            both = gl.inline_asm_elementwise(TWO_PARTS, "=r,r", [scale], gl.int32, is_pure=True, pack=1)
        own_pairs = append(own_pairs, both)
        if SECOND == "offsets":
            offset = (offset + scale * OFFSET_SCALES).to(gl.bfloat16)
            own_others = append(own_others, offset.to(gl.int16, bitcast=True).to(gl.int32))
        if SECOND == "points":
            own_others = append(own_others, (point & 0x7F) | (0x8000 | LARGE_BITS))
    pairs.index(buffer).store(_stacked(own_pairs))
    if SECOND != "none":
        others.index(buffer).store(_stacked(own_others))


@gluon.jit
def _stacked(items):
    """A tuple of 1, 2, 4 or 8 tensors [halves, outputs] -> [items, halves, outputs]"""
    COUNT: gl.constexpr = len(items)
    HALVES: gl.constexpr = items[0].shape[0]
    OUTPUTS: gl.constexpr = items[0].shape[1]
    if COUNT == 1:
        stacked = items[0].reshape([1, HALVES, OUTPUTS])
    elif COUNT == 2:
        stacked = gl.join(items[0], items[1]).permute((2, 0, 1))
    else:
        stacked = gl.join(_stacked(items[: COUNT // 2]), _stacked(items[COUNT // 2 :]))
        stacked = stacked.permute((3, 0, 1, 2)).reshape([COUNT, HALVES, OUTPUTS])
    return stacked


@gluon.jit
def _half_at(word, SHIFT: gl.constexpr):
    """An fp16 in an int32, as fp32"""
    return (word >> SHIFT).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _byte(word, INDEX: gl.constexpr, SIGNED: gl.constexpr):
    """A byte of an int32, as fp32: as the lowest bits of a large float, less the large number"""
    if SIGNED:
        word = word ^ -0x7F7F7F80
    bits = gl.inline_asm_elementwise(PLACE[INDEX], "=r,r", [word], gl.int32, is_pure=True, pack=1)
    return bits.to(gl.float32, bitcast=True) - (8388736.0 if SIGNED else 8388608.0)


@gluon.jit
def _power(word, INDEX: gl.constexpr):
    """A byte of exponents (exponents.py) as fp32: a scale times 2^63"""
    bits = ((word >> (8 * INDEX)) & 255) << 23
    return bits.to(gl.float32, bitcast=True)


PLACE = gl.constexpr(tuple(f"prmt.b32 $0, $1, 0x4B000000, 0x744{index};" for index in range(4)))
LARGE_BITS = gl.constexpr(LARGE)
POWER = gl.constexpr(2.0**95 * OF_BITS)  # 2**95 times a value of E2M1 * 2**-127 (wide_unpack.py): the weight * 2**-32


@gluon.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005 (Triton has no starred tuples)
