# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Planes of quantized values become 16-bit floats in registers, in about two instructions a value.

A conversion from integer to float runs at a quarter of the speed of other instructions, too slow beside the memory. So
values are placed into the mantissa of a large float instead (bf16 128 + q, fp16 1024 + q), where they read as an
integer, and the large number is subtracted: exact. A codebook is a permutation of bytes that are written into the
instructions. In the interpreter `asm` is empty and plain operations do the same."""

import struct
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from quire.ops.gpu.linear.e2m1 import E2M1, EIGHT, FACTOR, REST, SHIFT, TURN, unpack_e2m1
from quire.ops.gpu.linear.grouped_layout import HIGH_WORDS, GroupedArgs, GroupedWeight
from quire.ops.gpu.linear.grouped_scales import append

TURNED, SHIFTED, RESTS, TIMES, EIGHTS = (tl.constexpr(number) for number in (TURN, SHIFT, REST, FACTOR, EIGHT))
TURNED_BACK, TURNED_BITS = tl.constexpr(32 - TURN), tl.constexpr((1 << TURN) - 1)
ZERO_POINTS = -1  # as `ZERO`: each group has its own
HIGH_BITS = {dtype: bits for bits, dtype in HIGH_WORDS.items()}


def asm_for(weight: GroupedWeight, dtype: torch.dtype) -> str:
    """The instructions that unpack two words of the weight into `dtype`: each result is a plane of both."""
    assert dtype in (torch.bfloat16, torch.float16), dtype
    if triton.knobs.runtime.interpret:
        return ""
    if weight.bits == 8:
        return _int8(dtype)
    if weight.codebook == E2M1:
        return unpack_e2m1(dtype, in_pairs=False)
    if weight.codebook:
        return _codebook(dtype, weight.codebook)
    if weight.has_zero_points:
        return _zero_points(dtype, max(weight.chunk // weight.group, 1))
    return _integers(dtype, weight.zero, 0 if weight.high is None else HIGH_BITS[weight.high.dtype])


def kernel_args(weight: GroupedWeight, asm: str) -> GroupedArgs:
    codebook = torch.tensor(weight.codebook, device=weight.words.device) if weight.codebook and not asm else None
    scales = weight.scales.view(torch.uint32) if weight.has_exponents else weight.scales  # those of four groups
    return GroupedArgs(weight.words, weight.high, scales, weight.offsets, weight.super_scales, codebook)


def kernel_constants(weight: GroupedWeight, asm: str) -> dict[str, Any]:
    """What every kernel that unpacks the weight is compiled for."""
    return {
        "BITS": weight.bits,
        "GROUP": weight.group,
        "WIDTH": weight.width,
        "ZERO": ZERO_POINTS if weight.has_zero_points else weight.zero,
        "CODEBOOK": codebook_kind(weight),
        "ASM": asm,
    }


def codebook_kind(weight: GroupedWeight) -> str:
    """What kernels have to know of it: "e2m1", whose words lie in another order; "any"; none: ""."""
    return "e2m1" if weight.codebook == E2M1 else "any" if weight.codebook else ""


@triton.jit
def word_places(rows, chunk, chunks, columns, WIDTH: tl.constexpr, CODEBOOK: tl.constexpr):
    """Where columns of a chunk's words lie: [rows, columns]"""
    lines = rows * chunks + chunk
    if CODEBOOK == "e2m1":
        lines = (rows // EIGHTS * chunks + chunk) * EIGHTS + rows % EIGHTS
    return lines[:, None] * WIDTH + columns[None, :]


@triton.jit
def unpack(
    words,
    high,
    zeros,
    like,
    codebook,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    ASM: tl.constexpr,
):
    """words int32 [n, width], and None or further bits of their values, and a tuple of zero points [n] of the groups ->
    a tuple of planes, in the dtype of `like`"""
    d = like.dtype
    if CODEBOOK == "e2m1":
        planes = _unpack_pairs(words, like, codebook, ASM)
    elif ASM == "":
        planes = ()
        for plane in tl.static_range(32 // BITS):
            q = (words >> (BITS * plane)) & ((1 << BITS) - 1)
            if high is not None:
                HIGH: tl.constexpr = 2 if high.dtype == tl.int16 else 1
                q += (high.to(tl.int32) >> (HIGH * plane) & ((1 << HIGH) - 1)) << BITS
            if CODEBOOK != "":
                values = tl.load(codebook + q).to(d)
            elif BITS == 8:
                values = ((q ^ 128) - 128).to(tl.float32).to(d)
            elif ZERO < 0:
                values = (q - zeros[plane * len(zeros) // 8][:, None]).to(tl.float32).to(d)
            else:
                values = (q - ZERO).to(tl.float32).to(d)
            planes = append(planes, values)
    elif BITS == 8:
        planes = tl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r,r", [words], (d, d, d, d), is_pure=True, pack=2)
    elif ZERO < 0:
        planes = _unpack_from_zeros(words, zeros, like, ASM)
    elif high is None:
        planes = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], (d, d, d, d, d, d, d, d), is_pure=True, pack=2
        )
    else:
        planes = tl.inline_asm_elementwise(
            ASM,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [words, high.to(tl.int16)],
            (d, d, d, d, d, d, d, d),
            is_pure=True,
            pack=2,
        )
    return planes


@triton.jit
def _unpack_pairs(words, like, codebook, ASM: tl.constexpr):
    """As `unpack`, of words in pairs (e2m1.py)."""
    first, second = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 2, 2)))
    if ASM == "":
        evens, odds = _values_of(first, second, codebook, 0), _values_of(first, second, codebook, 16)
    else:
        s = tl.int16
        halves = tl.inline_asm_elementwise(
            ASM,
            "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [first, second],
            (s, s, s, s, s, s, s, s, s, s, s, s, s, s, s, s),
            is_pure=True,
            pack=1,
        )
        evens, odds = halves[:8], halves[8:]
    planes = ()
    for plane in tl.static_range(8):
        both = tl.interleave(evens[plane], odds[plane])
        planes = append(planes, both.to(like.dtype) if ASM == "" else both.to(like.dtype, bitcast=True))
    return planes


@triton.jit
def _values_of(first, second, codebook, HALF: tl.constexpr):
    """Planes of the words whose values are the lower halves of pairs (0) or the upper ones (16)."""
    values = ()
    for number in tl.static_range(2):
        word = first if number == 0 else second
        turned = (word << TURNED) | ((word >> TURNED_BACK) & TURNED_BITS)
        floats = (word, ((word & RESTS).to(tl.int64) * TIMES).to(tl.int32), turned, turned << SHIFTED)
        for plane in tl.static_range(4):
            bits = floats[plane] >> HALF
            values = append(values, tl.load(codebook + (((bits >> 6) & 7) | ((bits >> 12) & 8))))
    return values


@triton.jit
def _unpack_from_zeros(words, zeros, like, ASM: tl.constexpr):
    """The large number and the zero point are one float, made of the bits of both."""
    d = like.dtype
    EXPONENT: tl.constexpr = 0xC300 if d == tl.bfloat16 else 0xE400  # -128, -1024
    CONSTRAINTS: tl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r,r" + ",r" * len(zeros)
    arguments = (words,)
    for number in tl.static_range(len(zeros)):
        less = (zeros[number] | EXPONENT).to(tl.int16).to(d, bitcast=True)
        arguments = append(arguments, less[:, None])
    return tl.inline_asm_elementwise(ASM, CONSTRAINTS, list(arguments), (d, d, d, d, d, d, d, d), is_pure=True, pack=2)


@triton.jit
def take_planes(planes, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Concatenate 1, 2, 4 or 8 planes: [n, COUNT * width], in the order of inputs."""
    if COUNT == 1:
        values = planes[FIRST]
    else:
        HALF: tl.constexpr = COUNT // 2
        values = concatenate(take_planes(planes, FIRST, HALF), take_planes(planes, FIRST + HALF, HALF))
    return values


@triton.jit
def concatenate(first, second):
    """[n, k] and [n, k] -> [n, 2 k]. No lane needs what another has."""
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, (first.shape[0], 2 * first.shape[1]))


@cache
def _integers(dtype: torch.dtype, zero: int, high_bits: int) -> str:
    """Words $8, $9 -> planes $0 .. $7, two floats each: of the first word, then of the second. Further bits of their
    values are in the halves of $10."""
    exponent, fma, constants = _magic(dtype, zero)
    lines = [*constants, ".reg .b32 a, s, h;"]
    mask = ((1 << high_bits) - 1) << 4
    for plane in range(8):
        if plane % 4 == 0:
            lines.append(f"prmt.b32 a, $8, $9, {('0x5410', '0x7632')[plane // 4]};")  # the lower halves, the upper ones
        else:
            lines.append("shr.u32 a, a, 4;")
        lines.append(f"lop3.b32 s, a, 0x000F000F, {exponent}, 0xEA;")  # (a & 0x000F000F) | exponent
        if high_bits:
            right = high_bits * plane - 4
            lines.append(f"shr.u32 h, $10, {right};" if right >= 0 else f"shl.b32 h, $10, {-right};")
            lines.append(f"lop3.b32 s, h, 0x{mask << 16 | mask:08X}, s, 0xEA;")
        lines.append(f"{fma} ${plane}, s, one, less;")
    return _block(lines)


@cache
def _zero_points(dtype: torch.dtype, groups: int) -> str:
    """Words $8, $9 -> planes $0 .. $7; what each group subtracts is in both halves of $10, $11, ..."""
    exponent, fma, constants = _magic(dtype, 0)
    lines = [*constants, ".reg .b32 a, s;"]
    for plane in range(8):
        lines.append("shr.u32 a, a, 4;" if plane % 4 else f"prmt.b32 a, $8, $9, {('0x5410', '0x7632')[plane // 4]};")
        lines.append(f"lop3.b32 s, a, 0x000F000F, {exponent}, 0xEA;")
        lines.append(f"{fma} ${plane}, s, one, ${10 + plane * groups // 8};")
    return _block(lines)


@cache
def _int8(dtype: torch.dtype) -> str:
    """Words $4, $5 -> planes $0 .. $3."""
    exponent, fma, constants = _magic(dtype, 128)
    lines = [*constants, ".reg .b32 a, s, t;"]
    for plane in range(4):
        lines.append("shr.u32 a, a, 8;" if plane % 2 else f"prmt.b32 a, $4, $5, {('0x5410', '0x7632')[plane // 2]};")
        if dtype == torch.float16:  # q + 128 in the mantissa
            lines += [f"lop3.b32 s, a, 0x00FF00FF, {exponent}, 0xEA;", "xor.b32 s, s, 0x00800080;"]
            lines.append(f"{fma} ${plane}, s, one, less;")
        else:  # a bf16 has room for seven bits: 128 + the low seven, less 128 or 256, which differ in the eighth bit
            lines += [f"lop3.b32 s, a, 0x007F007F, {exponent}, 0xEA;", f"lop3.b32 t, a, 0x00800080, {exponent}, 0xEA;"]
            lines.append(f"{fma} ${plane}, t, minus, s;")
    return _block(lines)


@cache
def _codebook(dtype: torch.dtype, codebook: tuple[float, ...]) -> str:
    """Words $8, $9 -> planes $0 .. $7. Four values pick four bytes: among the entries 0 .. 7, among 8 .. 15, then by
    their top bits between the two; once for the lower bytes of the floats and once for the upper ones."""
    floats = [bits & 0xFFFF for bits in torch.tensor(codebook).to(dtype).view(torch.int16).tolist()]
    lines = [".reg .b32 s0, s1, t0, t1, p, q, l, h, x0, x1, y0, y1;"]
    for word in (0, 1):
        lines += [f"and.b32 s{word}, ${8 + word}, 0x77777777;", f"and.b32 t{word}, ${8 + word}, 0x88888888;"]
        lines += [f"shr.u32 t{word}, t{word}, 1;", f"or.b32 t{word}, t{word}, 0x32103210;"]
    for first in (0, 4):
        for word in (0, 1):
            if first:
                lines += [f"shr.u32 s{word}, s{word}, 16;", f"shr.u32 t{word}, t{word}, 16;"]
            for result, shift in (("l", 0), ("h", 8)):
                entries = [_word(f >> shift & 255 for f in floats[i : i + 4]) for i in range(0, 16, 4)]
                lines += [f"mov.b32 p, {entries[0]};", f"prmt.b32 p, p, {entries[1]}, s{word};"]
                lines += [f"mov.b32 q, {entries[2]};", f"prmt.b32 q, q, {entries[3]}, s{word};"]
                lines.append(f"prmt.b32 {result}, p, q, t{word};")
            lines += [f"prmt.b32 x{word}, l, h, 0x5140;", f"prmt.b32 y{word}, l, h, 0x7362;"]  # planes 0 1 and 2 3
        for plane, name in ((first, "x"), (first + 2, "y")):
            lines += [
                f"prmt.b32 ${plane}, {name}0, {name}1, 0x5410;",
                f"prmt.b32 ${plane + 1}, {name}0, {name}1, 0x7632;",
            ]
    return _block(lines)


def _magic(dtype: torch.dtype, zero: int) -> tuple[str, str, list[str]]:
    """-> the exponent of the large number, the instruction that subtracts it and zero, and its constants"""
    if dtype == torch.bfloat16:
        exponent, less, fma, one, minus = 0x43, 0xC300 | zero, "fma.rn.bf16x2", 0x3F80, 0xBF80
    else:
        exponent, less, fma, one, minus = 0x64, 0xE400 | zero, "fma.rn.f16x2", 0x3C00, 0xBC00
    constants = [".reg .b32 one, less, minus;"]
    constants += [
        f"mov.b32 {name}, 0x{n << 16 | n:08X};" for name, n in (("one", one), ("less", less), ("minus", minus))
    ]
    return f"0x{exponent:02X}00{exponent:02X}00", fma, constants


def _word(four_bytes: Iterable[int]) -> str:
    return f"0x{struct.unpack('<I', bytes(four_bytes))[0]:08X}"


def _block(lines: Iterable[str]) -> str:
    return "{\n" + "\n".join(lines) + "\n}"
