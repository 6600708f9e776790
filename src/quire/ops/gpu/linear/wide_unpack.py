"""Instructions that turn halves of words into planes of weights, for grouped_wide.py.

Values are placed into the mantissa of a large float, from which the large number and a zero point are subtracted, as in
unpack.py. Weights are then scaled as `dequantize` does: a scale is the sum of two bf16, `main` and `rest`, and what is
rounded to 16 bits is the weight. An offset is added to the smaller product. It is small, because the scale times the
middle of all values, which is subtracted from the values, is added to it (wide_scales.py)."""

from functools import cache

from quire.ops.gpu.linear.e2m1 import first_planes, last_planes

LARGE = 0x4300  # bf16 128, with room for seven bits


@cache
def unpack_pieces(bits: int, high_bits: int, zero: int, second: str) -> tuple[str, ...]:
    """Instructions for each piece of a word: two planes. `second`: what a group has beside its scale, or
    "exponents", which its scale is one of."""
    if second == "exponents":
        return tuple(map(_unpack_e2m1, range(4)))
    return tuple(_unpack(piece, bits, high_bits, zero, second) for piece in range(16 // bits))


def operands(high_bits: int, second: str) -> str:
    """Constraints of an instruction's operands: two planes; half a word (of words in pairs a whole one), further bits,
    the main parts of scales, the rests, zero points or offsets of both planes."""
    if second == "exponents":
        return "=r,=r,r,r,r"
    return "=r,=r,r" + ",r" * (5 if high_bits else 4) + ("" if second == "none" else ",r,r")


def _unpack(piece: int, bits: int, high_bits: int, zero: int, second: str) -> str:
    first = 4 if high_bits else 3
    lines = [".reg .b32 one, minus, less, a, s, t, h;", "mov.b32 one, 0x3F803F80;", "mov.b32 minus, 0xBF80BF80;"]
    lines.append(f"mov.b32 less, 0x{_less(zero) * 0x10001:08X};")
    for plane in (0, 1):
        main, rest, other = (f"${first + 2 * i + plane}" for i in range(3))
        shift = (2 * piece + plane) * bits % 16
        lines.append(f"shr.u32 a, $2, {shift};" if shift else "mov.b32 a, $2;")
        if bits == 4:
            lines.append(f"lop3.b32 s, a, 0x000F000F, 0x{LARGE * 0x10001:08X}, 0xEA;")  # (a & 0x000F000F) | 128
            if high_bits:
                mask = ((1 << high_bits) - 1 << 4) * 0x10001
                right = high_bits * (2 * piece + plane) - 4
                lines.append(f"shr.u32 h, $3, {right};" if right >= 0 else f"shl.b32 h, $3, {-right};")
                lines.append(f"lop3.b32 s, h, 0x{mask:08X}, s, 0xEA;")
            lines.append(f"fma.rn.bf16x2 s, s, one, {other if second == 'points' else 'less'};")
        else:  # 128 + the low seven bits, less 128 or 256
            lines.append("lop3.b32 s, a, 0x007F007F, 0x43004300, 0xEA;")
            lines.append("lop3.b32 t, a, 0x00800080, 0x43004300, 0xEA;")
            lines.append("fma.rn.bf16x2 s, t, minus, s;")
        if second == "offsets":
            lines.append(f"fma.rn.bf16x2 t, s, {rest}, {other};")
        else:
            lines.append(f"mul.rn.bf16x2 t, s, {rest};")
        lines.append(f"fma.rn.bf16x2 ${plane}, s, {main}, t;")
    return "{\n" + "\n".join(lines) + "\n}"


def _unpack_e2m1(piece: int) -> str:
    """Planes of a word in pairs (e2m1.py), and what they are multiplied with."""
    planes = last_planes if piece % 2 else first_planes
    lines = [".reg .b32 turned, s<2>;", *planes("$2", ("s0", "s1"))]
    lines += [f"mul.rn.bf16x2 ${plane}, s{plane}, ${3 + plane};" for plane in (0, 1)]
    return "{\n" + "\n".join(lines) + "\n}"


def _less(zero: int) -> int:
    """-(128 + zero) in bf16"""
    assert 0 <= zero < 128
    return 0x8000 | LARGE | zero
