"""Words of MXFP4's values, with bits where few instructions make bf16 of them.

A value has a sign, two bits of an exponent and one of a mantissa. As bits 15 and 8 .. 6 of a bf16 they are the value
times 2^-126, small values as subnormal numbers. Of two neighbouring words, the first one holds planes 0 .. 3 of both
and the second one planes 4 .. 7, so that a register of two bf16 has a plane's values of both words. The bits of a word
lie so that a mask is left to be applied

    plane 0 or 4   to the word
         1 or 5    to the word's bits `REST` times `FACTOR`: each goes to a place of its own, and nothing is carried
         2 or 6    to the word, rotated left by 10 bits
         3 or 7    to that, shifted left by 3

which are eight instructions for eight values; the nibbles of a word as they were would take fourteen.

The words of eight rows lie together, chunk by chunk: memory is [N / 8, chunks, 8, width]. A load of eight rows, which
is what the lanes of a warp have of an operand of tensor cores, is then 512 neighbouring bytes, not eight times 64."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

# Twice the values. Their scales are powers of two.
E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0)
MASK = 0x81C081C0  # signs, exponents and mantissas of two bf16
REST = 0x001B001B
FACTOR = 0x1084
TURN, SHIFT = 10, 3
EIGHT = 8  # rows of which the words of a chunk lie together


def place(words: Tensor) -> Tensor:
    """words int32 [N, chunks, width] with eight nibbles each, the lowest first -> the same values as kernels take them,
    with N rounded up to a multiple of eight"""
    even, odd = (words[..., i::2].long() & 0xFFFFFFFF for i in (0, 1))
    halves = (even & 0xFFFF | (odd & 0xFFFF) << 16, even >> 16 | odd >> 16 << 16)
    return _in_eights(torch.stack([_place_planes(half) for half in halves], dim=-1).flatten(-2))


def stack_words(parts: Sequence[Tensor], num_rows: Sequence[int]) -> Tensor:
    """The words of matrices that were placed, one below the other."""
    if all(number % EIGHT == 0 for number in num_rows):
        return torch.cat(tuple(parts))
    rows = [rows_in_order(part)[:number] for part, number in zip(parts, num_rows, strict=True)]
    return _in_eights(torch.cat(rows))


def take_rows(words: Tensor, order: Tensor) -> Tensor:
    """Some rows of words that were placed, as such."""
    return _in_eights(rows_in_order(words)[order])


def _in_eights(rows: Tensor) -> Tensor:
    """[N, chunks, width] -> the same shape, N rounded up, with memory for [N / 8, chunks, 8, width]"""
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, -len(rows) % EIGHT))
    return rows.unflatten(0, (-1, EIGHT)).transpose(1, 2).contiguous().view(rows.shape)


def rows_in_order(words: Tensor) -> Tensor:
    _, chunks, width = words.shape
    return words.view(-1, chunks, EIGHT, width).transpose(1, 2).reshape(words.shape)


def _place_planes(halves: Tensor) -> Tensor:
    """Four nibbles in each half of an int64 -> int32"""
    direct, rest, turned, shifted = (_as_floats(halves >> 4 * plane & 0x000F000F) for plane in range(4))
    word = direct | rest >> 7 & 0x00030003 | rest >> 2 & 0x00100010 | rest >> 12 & 0x00080008
    word |= _turn(turned, 32 - TURN) | _turn(shifted, 32 - TURN - SHIFT)
    return (word - (word >> 31 << 32)).int()


def _as_floats(nibbles: Tensor) -> Tensor:
    return (nibbles & 0x00070007) << 6 | (nibbles & 0x00080008) << 12


def _turn(word: Tensor, bits: int) -> Tensor:
    return (word << bits | word >> 32 - bits) & 0xFFFFFFFF


def nibbles_of(words: Tensor) -> Tensor:
    """The inverse of `place`: [N, chunks, width], N rounded up"""
    words = rows_in_order(words)
    first, second = (_nibbles(words[..., i::2].long() & 0xFFFFFFFF) for i in (0, 1))
    both = [first & 0xFFFF | (second & 0xFFFF) << 16, first >> 16 | second >> 16 << 16]
    return torch.stack([(word - (word >> 31 << 32)).int() for word in both], dim=-1).flatten(-2)


def _nibbles(word: Tensor) -> Tensor:
    turned = _turn(word, TURN)
    planes = [word & MASK, (word & REST) * FACTOR & MASK, turned & MASK, turned << SHIFT & MASK]
    found = torch.zeros_like(word)
    for plane, floats in enumerate(planes):
        found |= (floats >> 6 & 0x00070007 | floats >> 12 & 0x00080008) << 4 * plane
    return found


def plane_pairs(word: str, planes: Sequence[str]) -> list[str]:
    """Instructions that make four planes' pairs of bf16 of a word, times 2^-126, and need a register `turned`."""
    return [*first_planes(word, planes[:2]), *last_planes(word, planes[2:])]


def first_planes(word: str, planes: Sequence[str]) -> list[str]:
    direct, rest = planes
    return [
        f"and.b32 {direct}, {word}, 0x{MASK:08X};",
        f"and.b32 {rest}, {word}, 0x{REST:08X};",
        f"mul.lo.u32 {rest}, {rest}, 0x{FACTOR:X};",
        f"and.b32 {rest}, {rest}, 0x{MASK:08X};",
    ]


def last_planes(word: str, planes: Sequence[str]) -> list[str]:
    first, second = planes
    return [
        f"shf.l.wrap.b32 turned, {word}, {word}, {TURN};",
        f"and.b32 {first}, turned, 0x{MASK:08X};",
        f"shl.b32 {second}, turned, {SHIFT};",
        f"and.b32 {second}, {second}, 0x{MASK:08X};",
    ]


@cache
def unpack_e2m1(dtype: torch.dtype, in_pairs: bool) -> str:
    """Two neighbouring words, the last operands -> planes of `E2M1` in `dtype`: $0 .. $7, of both words each; else of
    the first word, and $8 .. $15 of the second."""
    power = 0x7F007F00 if dtype == torch.bfloat16 else 0x78007800  # 2^127, 2^15
    lines = [".reg .b32 turned, power, t<8>;", f"mov.b32 power, 0x{power:08X};"]
    for number in (0, 1):
        word = f"${(8 if in_pairs else 16) + number}"
        lines += plane_pairs(word, [f"t{4 * number + plane}" for plane in range(4)])
    for plane in range(8):
        lines += _twice(f"t{plane}", dtype)
        lines.append(f"mov.b32 ${plane}, t{plane};" if in_pairs else f"mov.b32 {{${plane}, ${plane + 8}}}, t{plane};")
    return "{\n" + "\n".join(lines) + "\n}"


def _twice(pair: str, dtype: torch.dtype) -> list[str]:
    """Twice a value from what is that value times 2^-126."""
    if dtype == torch.bfloat16:
        return [f"mul.rn.bf16x2 {pair}, {pair}, power;"]
    move = [f"and.b32 turned, {pair}, 0x01C001C0;", "shl.b32 turned, turned, 3;"]  # an fp16 has bits 11 .. 9
    sign = f"lop3.b32 {pair}, {pair}, 0x80008000, turned, 0xEA;"
    return [*move, sign, f"mul.rn.f16x2 {pair}, {pair}, power;"]
