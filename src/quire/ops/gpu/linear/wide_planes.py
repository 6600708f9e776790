# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Planes of words become weights in the registers of grouped_wide.py, with scales from shared memory (wide_scales.py)
and the instructions of wide_unpack.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.ops.gpu.linear.wide_scales import append

HALVES = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")
WHOLE = gl.constexpr("mov.b32 $0, $2; mov.b32 $1, $3;")


@gluon.jit
def halves_of(words, IN_PAIRS: gl.constexpr = False):
    """Planes of two words in a register: the lower halves' and the upper halves'. Words in pairs (e2m1.py) have them
    so."""
    asm: gl.constexpr = WHOLE if IN_PAIRS else HALVES
    return gl.inline_asm_elementwise(asm, "=r,=r,r,r", [words], (gl.int16, gl.int16), is_pure=True, pack=2)


@gluon.jit
def side_by_side(low, high):
    """[outputs, 16] twice -> [outputs, 32]"""
    return gl.join(low, high).permute((0, 2, 1)).reshape([low.shape[0], 2 * low.shape[1]])


@gluon.jit
def unpack_piece(
    halves,
    high,
    pairs,
    others,
    buffer,
    INDEX: gl.constexpr,
    BITS: gl.constexpr,
    HIGH: gl.constexpr,
    WIDTH: gl.constexpr,
    SECOND: gl.constexpr,
    GROUP: gl.constexpr,
    ITEMS: gl.constexpr,
    HALF_COUNT: gl.constexpr,
    ROWS: gl.constexpr,
    UNPACK: gl.constexpr,
    OPERANDS: gl.constexpr,
    RESTS: gl.constexpr = True,
):
    """Two planes of a span, scaled."""
    PART: gl.constexpr = INDEX // (16 // BITS)
    PIECE: gl.constexpr = INDEX % (16 // BITS)
    values = (halves[PART * 2 + PIECE * BITS // 8],)
    if HIGH > 0:
        values = append(values, high[PART].to(gl.int16))
    low_place = _place(INDEX * 2 * WIDTH, buffer, GROUP, ITEMS, HALF_COUNT)
    high_place = _place(INDEX * 2 * WIDTH + WIDTH, buffer, GROUP, ITEMS, HALF_COUNT)
    low_pair = pairs.index(low_place).load(ROWS)
    high_pair = pairs.index(high_place).load(ROWS) if GROUP <= WIDTH else low_pair
    values = append(append(values, _bf16(low_pair, 0)[:, None]), _bf16(high_pair, 0)[:, None])
    if RESTS:
        values = append(append(values, _bf16(low_pair, 16)[:, None]), _bf16(high_pair, 16)[:, None])
    if SECOND != "none":
        low_other = others.index(low_place).load(ROWS)
        high_other = others.index(high_place).load(ROWS) if GROUP <= WIDTH else low_other
        values = append(append(values, _bf16(low_other, 0)[:, None]), _bf16(high_other, 0)[:, None])
    return gl.inline_asm_elementwise(
        UNPACK[PIECE], OPERANDS, list(values), (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.constexpr_function
def _first_place(k, group, items, halves):
    """Where the scales of an input's group lie in the first buffer."""
    number = k // group if group else 0
    return number % items * halves + number // items


@gluon.jit
def _place(K: gl.constexpr, buffer, GROUP: gl.constexpr, ITEMS: gl.constexpr, HALF_COUNT: gl.constexpr):
    return buffer * (ITEMS * HALF_COUNT) + _first_place(K, GROUP, ITEMS, HALF_COUNT)


@gluon.jit
def _bf16(pair, SHIFT: gl.constexpr):
    return (pair >> SHIFT).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.constexpr_function
def words_layout(rows, warps, width):
    """How threads hold words [rows, width]: as an operand of the tensor cores holds 16-bit values."""
    registers = [[0, 1], [8, 0], [0, 8]] + ([[0, 16]] if width == 32 else [])
    warp_rows, step = [], 16
    while step < 16 * warps:
        warp_rows.append([step, 0])
        step *= 2
    while step < rows:
        registers.append([step, 0])
        step *= 2
    return gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], warp_rows, [], [rows, width])
