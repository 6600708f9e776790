"""Which weights quantized_few.py multiplies, and the instructions that unpack them."""

from functools import cache
from typing import Any, NamedTuple

import torch

from quire.ops.gpu.linear.e2m1 import E2M1, plane_pairs, unpack_e2m1
from quire.ops.gpu.linear.grouped_layout import HIGH_WORDS, GroupedWeight
from quire.ops.gpu.linear.unpack import asm_for, codebook_kind

HIGH_BITS = {dtype: bits for bits, dtype in HIGH_WORDS.items()}


class FewRoutesFormat(NamedTuple):
    kind: str  # how scales are stored: "exponents"; "halves", fp16 in words; "six", "bytes": of K-quants; "floats"
    second: str  # what a group has beside its scale: "none", "points", "offsets"
    unpack: tuple[str, ...]  # instructions for each plane, or for all of them


def few_format(weight: GroupedWeight) -> FewRoutesFormat | None:
    """None: the kernel does not know the weight's words."""
    if weight.width not in (16, 32):
        return None
    second = "points" if weight.has_zero_points else "offsets" if weight.has_offsets else "none"
    if weight.has_exponents:
        return FewRoutesFormat("exponents", second, (_e2m1(weight.width),))
    if weight.scales.is_floating_point():
        kind = "floats"
    elif weight.super_scales is None:
        kind = "halves"
    else:
        kind = "six" if weight.scales.dtype == torch.int32 else "bytes"
    if weight.codebook:
        in_pairs = weight.codebook == E2M1
        asm = unpack_e2m1(torch.bfloat16, True) if in_pairs else asm_for(weight, torch.bfloat16)
        return FewRoutesFormat(kind, second, (asm,))
    high_bits = 0 if weight.high is None else HIGH_BITS[weight.high.dtype]
    planes = range(32 // weight.bits)
    return FewRoutesFormat(
        kind, second, tuple(_plane(plane, weight.bits, high_bits, weight.zero, second == "points") for plane in planes)
    )


def constants_of(weight: GroupedWeight, form: FewRoutesFormat) -> dict[str, Any]:
    return {
        "BITS": weight.bits,
        "WIDTH": weight.width,
        "GROUP": weight.group,
        "KIND": form.kind,
        "SECOND": form.second,
        "CODEBOOK": codebook_kind(weight),
        "HIGH": weight.high is not None,
        "UNPACK": form.unpack,
    }


@cache
def _e2m1(width: int) -> str:
    """Words $16 .. $19 and the exponents of their groups -> planes of four values each, $0 and $1, $2 and $3, and so
    on, times 2^-64. To multiply by a power of two adds the exponents, that of a subnormal number, too. A
    multiplication takes a half of a register twice, so that two powers are in one."""
    groups = 4 if width == 16 else 8
    lines = [".reg .b32 turned, s, p<4>, t<16>;", ".reg .b16 h<8>;"]
    for word in range(4):
        pairs = [f"t{2 * (word % 2 * 4 + plane) + word // 2}" for plane in range(4)]
        lines += plane_pairs(f"${16 + word}", pairs)
    for four in range(groups // 4):  # bytes 0 and 2, then 1 and 3, become the exponents of two bf16
        bytes_, even, odd = f"${20 + 4 * four}", f"p{2 * four}", f"p{2 * four + 1}"
        lines += [f"shl.b32 {even}, {bytes_}, 7;", f"and.b32 {even}, {even}, 0x7F807F80;"]
        lines += [f"shr.u32 {odd}, {bytes_}, 1;", f"and.b32 {odd}, {odd}, 0x7F807F80;"]
        lines += [f"mov.b32 {{h{4 * four + i}, h{4 * four + i + 2}}}, {word};" for i, word in ((0, even), (1, odd))]
    for plane in range(8):
        group = plane * groups // 8
        lines.append(f"mov.b32 s, {{h{group},h{group}}};")
        lines += [f"mul.rn.bf16x2 ${pair}, t{pair}, s;" for pair in (2 * plane, 2 * plane + 1)]
    return "{\n" + "\n".join(lines) + "\n}"


@cache
def _plane(plane: int, bits: int, high_bits: int, zero: int, has_points: bool) -> str:
    """Halves of two words $1, further bits $2 -> a plane's two values $0. With points, the last operand is -128 less
    the zero point."""
    shift = plane * bits % 16
    lines = [
        ".reg .b32 one, less, a, s, t, h;",
        "mov.b32 one, 0x3F803F80;",
        f"mov.b32 less, 0x{(0xC300 | zero) * 0x10001:08X};",
    ]
    lines.append(f"shr.u32 a, $1, {shift};" if shift else "mov.b32 a, $1;")
    if bits == 8:  # 128 + the low seven bits, less 128 or 256
        lines += ["lop3.b32 s, a, 0x007F007F, 0x43004300, 0xEA;", "lop3.b32 t, a, 0x00800080, 0x43004300, 0xEA;"]
        lines += ["mov.b32 less, 0xBF80BF80;", "fma.rn.bf16x2 $0, t, less, s;"]
    else:
        lines.append("lop3.b32 s, a, 0x000F000F, 0x43004300, 0xEA;")
        if high_bits:
            mask, right = ((1 << high_bits) - 1 << 4) * 0x10001, high_bits * plane - 4
            lines.append(f"shr.u32 h, $2, {right};" if right >= 0 else f"shl.b32 h, $2, {-right};")
            lines.append(f"lop3.b32 s, h, 0x{mask:08X}, s, 0xEA;")
        point = "$3" if high_bits else "$2"
        lines.append(f"fma.rn.bf16x2 $0, s, one, {point if has_points else 'less'};")
    return "{\n" + "\n".join(lines) + "\n}"
