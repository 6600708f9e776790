# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""What a lane of grouped_few.py loads and computes: tensors of one number a lane, [lanes of all warps], and tuples of
them. Loads of several neighbouring numbers are tensors with a second axis."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.ops.gpu.linear.few_unpack import HALF, PAIRS, TWO_BYTES

PREPARE, BYTES, FLOAT = gl.constexpr(PAIRS), gl.constexpr(TWO_BYTES), gl.constexpr(HALF)


@gluon.jit
def append(values, value):
    return values + (value,)  # noqa: RUF005 (Triton has no starred tuples)


@gluon.jit
def load_run(ptr, places, COUNT: gl.constexpr, FURTHER: gl.constexpr = 0):
    """Of each lane the words COUNT * place .. COUNT * (place + 1), as many words further: a tuple"""
    found = ()
    if COUNT == 8:
        found = load_run(ptr, places * 2, 4, FURTHER) + load_run(ptr, places * 2, 4, FURTHER + 4)
    elif COUNT == 2 or COUNT == 4:
        found = _parts(gl.load(_run(ptr, places, COUNT) + FURTHER))
    else:
        for number in gl.static_range(COUNT):
            found = append(found, gl.load(ptr + places * COUNT + (number + FURTHER)))
    return found


@gluon.jit
def load_present(ptr, places, present, ALL: gl.constexpr, COUNT: gl.constexpr, FURTHER: gl.constexpr = 0):
    """The same of two or four, and zeros where none is present. ALL: all are."""
    if ALL:
        found = gl.load(_run(ptr, places, COUNT) + FURTHER)
    else:
        WIDE: gl.constexpr = gl.BlockedLayout([1, COUNT], [32, 1], [places.shape[0] // 32, 1], [1, 0])
        here = gl.convert_layout(present, gl.SliceLayout(1, WIDE), assert_trivial=True)
        found = gl.load(_run(ptr, places, COUNT) + FURTHER, mask=here[:, None], other=0)
    return _parts(found)


@gluon.jit
def _run(ptr, places, COUNT: gl.constexpr):
    WIDE: gl.constexpr = gl.BlockedLayout([1, COUNT], [32, 1], [places.shape[0] // 32, 1], [1, 0])
    wide = gl.convert_layout(places, gl.SliceLayout(1, WIDE), assert_trivial=True)
    return ptr + ((wide * COUNT)[:, None] + gl.arange(0, COUNT, gl.SliceLayout(0, WIDE))[None, :])


@gluon.jit
def _parts(x):
    """[n, 2] or [n, 4] -> two or four [n]"""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [x.shape[0] // 32], [0])
    if x.shape[1] == 2:
        found = gl.split(x)
    else:
        even, odd = gl.split(x.reshape([x.shape[0], 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        found = (first, second, third, fourth)
    converted = ()
    for number in gl.static_range(len(found)):
        converted = append(converted, gl.convert_layout(found[number], LANES, assert_trivial=True))
    return converted


@gluon.jit
def stacked(values):
    """A tuple of 2, 4 or 8 [n] -> [n, count]"""
    COUNT: gl.constexpr = len(values)
    if COUNT == 2:
        found = gl.join(values[0], values[1])
    else:
        found = gl.join(stacked(values[: COUNT // 2]), stacked(values[COUNT // 2 :]))
        found = found.permute((0, 2, 1)).reshape([values[0].shape[0], COUNT])
    return found


@gluon.jit
def half_at(word, SHIFT: gl.constexpr):
    """An fp16 in an int32, as fp32"""
    return gl.inline_asm_elementwise(FLOAT[SHIFT // 16], "=f,r", [word], gl.float32, is_pure=True, pack=1)


@gluon.jit
def words_of(several: gl.constexpr, NUMBER: gl.constexpr, words, COUNT: gl.constexpr):
    """Instructions with one or two words as results"""
    if COUNT == 1:
        found = gl.inline_asm_elementwise(
            several[NUMBER], "=r" + ",r" * len(words), list(words), gl.int32, is_pure=True, pack=1
        )
    else:
        found = gl.inline_asm_elementwise(
            several[NUMBER], "=&r,=&r" + ",r" * len(words), list(words), (gl.int32, gl.int32), is_pure=True, pack=1
        )
    return found


@gluon.jit
def sums_of(
    several: gl.constexpr, NUMBER: gl.constexpr, operands: gl.constexpr, KIND: gl.constexpr, values, COUNT: gl.constexpr
):
    """Instructions with four, eight or sixteen sums as results"""
    if COUNT == 4:
        found = gl.inline_asm_elementwise(
            several[NUMBER],
            operands[KIND],
            list(values),
            (gl.float32, gl.float32, gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    elif COUNT == 8:
        found = gl.inline_asm_elementwise(
            several[NUMBER],
            operands[KIND],
            list(values),
            (gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        found = gl.inline_asm_elementwise(
            several[NUMBER],
            operands[KIND],
            list(values),
            (
                gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32,
                gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32,
            ),
            is_pure=True,
            pack=1,
        )  # fmt: skip
    return found


@gluon.jit
def pairs_of(words, high, BITS: gl.constexpr, HIGH: gl.constexpr):
    """For each of two rows: the lower halves of words in four pairs, the upper halves, and further bits of the pairs.
    Of 8 bits words stay as they are."""
    pairs, further = (), ()
    for row in gl.static_range(2 if BITS == 4 else 0):
        lower, higher = (), ()
        for two in gl.static_range(4):
            a, b = words_of(PREPARE, 0, (words[8 * row + 2 * two], words[8 * row + 2 * two + 1]), 2)
            lower, higher = append(lower, a), append(higher, b)
        pairs = pairs + lower + higher
    if HIGH == 2:
        further = high
    elif HIGH == 1:
        for number in gl.static_range(4):
            a, b = words_of(PREPARE, 1, (high[number],), 2)
            further = append(append(further, a), b)
    return words if BITS == 8 else pairs, further


@gluon.jit
def scale_pairs(own, lane, KIND: gl.constexpr, PER_ROW: gl.constexpr):
    """Two fp16 a word: the scales of planes 0 and 1, 2 and 3, 4 and 5, 6 and 7 of a row, where groups are small those
    of the second half, then those of the other row. Scales that are fp16 stay as they are."""
    zeros, pairs = lane * 0, ()
    for row in gl.static_range(2):
        if KIND == "six":
            first, rest = own[PER_ROW * row], own[PER_ROW * row + 2]
            low, high = first & 0x3F3F3F3F, (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
            pairs = pairs + _byte_pairs(low, zeros, 0) + _byte_pairs(high, zeros, 0)
        elif KIND == "pairs":
            for number in gl.static_range(4):
                pairs = append(pairs, words_of(BYTES, 0, (own[PER_ROW * row + number], zeros + 0x4240), 1))
        elif KIND == "bytes":
            for number in gl.static_range(4):
                pairs = pairs + _byte_pairs(own[PER_ROW * row + number] ^ -0x7F7F7F80, zeros, 2)
    return own if KIND == "halves" or KIND == "floats" else pairs


@gluon.jit
def _byte_pairs(word, zeros, LESS: gl.constexpr):
    return (words_of(BYTES, LESS, (word, zeros + 0x4140), 1), words_of(BYTES, LESS, (word, zeros + 0x4342), 1))


@gluon.jit
def scale_of(
    words, ROW: gl.constexpr, PLANE: gl.constexpr, HALF: gl.constexpr,
    KIND: gl.constexpr, PER_ROW: gl.constexpr, GROUP: gl.constexpr, POINTS: gl.constexpr,
):  # fmt: skip
    """The scale of a plane (of half of it, where groups are so small), in fp32, of `scale_pairs`"""
    ONE_LEVEL: gl.constexpr = KIND == "halves" or KIND == "floats"
    NUMBER: gl.constexpr = PLANE * 32 // GROUP if ONE_LEVEL else PLANE
    FIRST: gl.constexpr = PER_ROW * ROW if ONE_LEVEL else 8 * ROW + 4 * HALF if KIND == "bytes" else 4 * ROW
    if KIND == "floats":
        found = words[FIRST + NUMBER].to(gl.float32)
    elif POINTS:
        found = half_at(words[FIRST + NUMBER], 0)
    else:
        found = half_at(words[FIRST + NUMBER // 2], NUMBER % 2 * 16)
    return found


@gluon.jit
def of_plane_sums(own, lane, KIND: gl.constexpr, PER_ROW: gl.constexpr):
    """What the sums of a lane's two planes are multiplied with: for each row their scales, times -1024 and -64, and
    their offsets"""
    upper = lane % 4 >= 2
    selector = gl.where(lane % 2 == 0, 0x4140, 0x4342)
    scales, offsets = (), ()
    for row in gl.static_range(2):
        if KIND == "six":
            first, second, rest = own[PER_ROW * row], own[PER_ROW * row + 1], own[PER_ROW * row + 2]
            low, high = first & 0x3F3F3F3F, (rest & 0x0F0F0F0F) | ((first >> 2) & 0x30303030)
            low_offsets, high_offsets = second & 0x3F3F3F3F, ((rest >> 4) & 0x0F0F0F0F) | ((second >> 2) & 0x30303030)
            of_scales, of_offsets = gl.where(upper, high, low), gl.where(upper, high_offsets, low_offsets)
            scales = append(scales, words_of(BYTES, 1, (of_scales, selector), 1))
            offsets = append(offsets, words_of(BYTES, 0, (of_offsets, selector), 1))
        else:
            both = own[PER_ROW * row + 4]
            scales = append(scales, words_of(BYTES, 1, (both, selector * 0 + 0x4240), 1))
            offsets = append(offsets, words_of(BYTES, 0, (both, selector * 0 + 0x4341), 1))
    return scales, offsets


@gluon.jit
def with_super_scale(sums, below, NUMBER: gl.constexpr, above, KIND: gl.constexpr):
    """A sum times its super-scale, less what is below times that of offsets"""
    total = sums[NUMBER]
    if KIND == "bytes":
        total *= above
    elif KIND == "six" or KIND == "pairs":
        total = total * half_at(above, 0) - below[NUMBER] * half_at(above, 16)
    return total
