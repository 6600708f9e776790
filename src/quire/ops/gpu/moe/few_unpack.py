# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Words, scales and offsets of quantized_few.py's chunks: from memory into registers, and from those into 16 bits."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.ops.gpu.linear.wide_scales import PLACE, append


@gluon.constexpr_function
def words_layout(parts, warps, width):
    """Of words [parts, 16 * warps, width]: a thread has what it multiplies, of two rows."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0]] + ([[0, 0, 16]] if width == 32 else [])
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    of_warps, step = [], 16
    while step < 16 * warps:
        of_warps.append([0, step, 0])
        step *= 2
    step = 1
    while step < parts:
        of_warps.append([step, 0, 0])
        step *= 2
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [parts, 16 * warps, width])


@gluon.constexpr_function
def _num_words(kind, numbers):
    """Words that hold a chunk's numbers of one output; floats lie apart."""
    return {"floats": 1, "six": 3, "halves": numbers // 2}.get(kind, numbers // 4)


@gluon.jit
def pointers_of(
    words_ptr,
    high_ptr,
    scales_ptr,
    offsets_ptr,
    super_ptr,
    expert_rows,  # those of the experts before
    rows,  # [1, rows]
    columns,  # [width]
    begin,  # [parts, 1]
    chunks,
    all_outputs,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    HIGH: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNK: gl.constexpr,
    WIDTH: gl.constexpr,
    CODEBOOK: gl.constexpr,
):
    """Of each part's first chunk: what `load_chunk` adds chunks to."""
    if CODEBOOK == "e2m1":  # the words of eight rows lie together
        all_rows = expert_rows + rows
        lines = (all_rows // 8 * chunks + begin) * 8 + all_rows % 8
        before = 0
    else:
        lines = rows * chunks + begin
        before = expert_rows * chunks * WIDTH
    inside = lines[:, :, None] * WIDTH + columns[None, :][None, :, :]
    PER_GROUP: gl.constexpr = 1 if SECOND == "none" else 2
    GROUPS: gl.constexpr = max(CHUNK // GROUP, 1)
    words = words_ptr + before + inside
    high = high_ptr + before + inside if HIGH else words
    scale_rows = rows + begin * all_outputs * (GROUPS if KIND == "floats" else 1) if GROUP <= CHUNK else rows
    scales = scales_ptr + expert_rows * _num_words(KIND, GROUPS * PER_GROUP)
    scales += scale_rows * _num_words(KIND, GROUPS * PER_GROUP)
    offsets = offsets_ptr + expert_rows + scale_rows if KIND == "floats" and SECOND == "offsets" else scales
    supers = super_ptr + expert_rows + rows if KIND == "six" or KIND == "bytes" else scales
    return words, high, scales, offsets, supers


@gluon.jit
def load_chunk(
    pointers,  # of words, further bits [parts, rows, width]; of scales, offsets, super-scales [parts, rows]
    begin,
    chunk,  # after `begin`
    all_outputs,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    HIGH: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNK: gl.constexpr,
    WIDTH: gl.constexpr,
    CODEBOOK: gl.constexpr,
):
    """A chunk's words, further bits, and the numbers of its groups, all as they lie in memory."""
    word_ptr, high_ptr, scale_ptr, offset_ptr, super_ptr = pointers
    STEP: gl.constexpr = 8 * WIDTH if CODEBOOK == "e2m1" else WIDTH
    words = gl.load(word_ptr + chunk * STEP, eviction_policy="evict_first")
    high = gl.load(high_ptr + chunk * WIDTH, eviction_policy="evict_first") if HIGH else words
    GROUPS: gl.constexpr = max(CHUNK // GROUP, 1)
    PER_GROUP: gl.constexpr = 1 if SECOND == "none" else 2
    if GROUP <= CHUNK:
        index = chunk.to(gl.int64) * all_outputs
    else:
        index = (begin + chunk) * CHUNK // GROUP * gl.cast(all_outputs, gl.int64)
    numbers = ()
    if KIND == "floats":
        for number in gl.static_range(GROUPS):
            place = index * GROUPS + number * gl.cast(all_outputs, gl.int64)
            numbers = append(numbers, gl.load(scale_ptr + place))
            if SECOND == "offsets":
                numbers = append(numbers, gl.load(offset_ptr + place))
    else:
        WORDS: gl.constexpr = _num_words(KIND, GROUPS * PER_GROUP)
        for number in gl.static_range(WORDS):
            numbers = append(numbers, gl.load(scale_ptr + index * WORDS + number))
        if KIND == "six" or KIND == "bytes":
            block = (begin + chunk) * CHUNK // 256
            numbers = append(numbers, gl.load(super_ptr + block.to(gl.int64) * all_outputs))
    return words, high, numbers


@gluon.jit
def _half_at(word, SHIFT: gl.constexpr):
    """An fp16 in an int32, as fp32"""
    return (word >> SHIFT).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _byte(word, INDEX: gl.constexpr):
    """A byte of an int32, as fp32: the lowest bits of a large float, less the large number. A signed byte must have its
    top bit inverted."""
    bits = gl.inline_asm_elementwise(PLACE[INDEX], "=r,r", [word], gl.int32, is_pure=True, pack=1)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def six_bits(numbers):
    """As `grouped_scales.as_bytes`, and the super-scales."""
    scales, offsets, rest, above = numbers
    return (
        scales & 0x3F3F3F3F,
        (rest & 0x0F0F0F0F) | ((scales >> 2) & 0x30303030),
        offsets & 0x3F3F3F3F,
        ((rest >> 4) & 0x0F0F0F0F) | ((offsets >> 2) & 0x30303030),
        above,
    )


@gluon.jit
def signed_bytes(numbers):
    """Bytes and super-scales, with the bytes' top bits inverted: see `_byte`."""
    words = ()
    for number in gl.static_range(len(numbers) - 1):
        words = append(words, numbers[number] ^ -0x7F7F7F80)
    return append(words, numbers[len(numbers) - 1])


@gluon.jit
def number_of(numbers, KIND: gl.constexpr, SECOND: gl.constexpr, GROUP: gl.constexpr, OFFSET: gl.constexpr):
    """The scale of group GROUP of a chunk, or its offset, in fp32: [parts, rows]. Where there are super-scales, before
    it is multiplied with them."""
    PER_GROUP: gl.constexpr = 1 if SECOND == "none" else 2
    INDEX: gl.constexpr = GROUP * PER_GROUP + OFFSET
    if KIND == "floats":
        FLOATS: gl.constexpr = 2 if SECOND == "offsets" else 1
        value = numbers[GROUP * FLOATS + OFFSET].to(gl.float32)
    elif KIND == "halves":
        value = _half_at(numbers[INDEX // 2], INDEX % 2 * 16)
    elif KIND == "six":
        value = _byte(numbers[OFFSET * 2 + GROUP // 4], GROUP % 4) - 8388608.0
    else:
        value = _byte(numbers[INDEX // 4], INDEX % 4) - 8388736.0
    return value


@gluon.jit
def super_scales(numbers, SECOND: gl.constexpr):
    """Those of scales and of offsets, in fp32: [parts, rows]"""
    above = numbers[len(numbers) - 1]
    of_scales, of_offsets = above, above
    if SECOND == "offsets":
        of_scales, of_offsets = _half_at(above, 0), -_half_at(above, 16)
    return of_scales, of_offsets


@gluon.jit
def all_planes(loaded, KIND: gl.constexpr, UNPACK: gl.constexpr):
    """Planes of a codebook's values; with exponents, of weights times 2^-64."""
    words, _, numbers = loaded
    arguments = (words,)
    if KIND == "exponents":
        for number in gl.static_range(len(numbers)):
            arguments = append(arguments, numbers[number][:, :, None])
        OPERANDS: gl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r" + ",r,r,r,r" * len(numbers)
        planes = gl.inline_asm_elementwise(
            UNPACK[0],
            OPERANDS,
            list(arguments),
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        planes = gl.inline_asm_elementwise(
            UNPACK[0],
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            list(arguments),
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return planes


@gluon.jit
def plane_of(halves, loaded, INDEX: gl.constexpr, SECOND: gl.constexpr, HIGH: gl.constexpr, PER_GROUP: gl.constexpr,
           BITS: gl.constexpr, UNPACK: gl.constexpr):  # fmt: skip
    """One plane of integers, less their zero point."""
    _, high, numbers = loaded
    arguments = (halves[INDEX * BITS // 16],)
    if HIGH:
        arguments = append(arguments, high.to(gl.int16))
    if SECOND == "points":
        less = ((numbers[INDEX // PER_GROUP] >> 16) & 0x7F) | 0xC300
        arguments = append(arguments, less.to(gl.int16).to(gl.bfloat16, bitcast=True)[:, :, None])
    OPERANDS: gl.constexpr = "=r" + ",r" * len(arguments)
    return gl.inline_asm_elementwise(UNPACK[INDEX], OPERANDS, list(arguments), gl.bfloat16, is_pure=True, pack=2)
