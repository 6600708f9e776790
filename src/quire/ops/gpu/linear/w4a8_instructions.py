"""4 bits become fp8 values in registers: for w4a8.py and w4a8_wide.py.

The bits of fp8 (e4m3) from 0 to 15 are those of 0 .. 15 times 2**-9: subnormal values, and the first ones that are
normal. So the bits of a magnitude are those of its fp8 value, and the sign stands above. Looking values up in tables
takes more instructions; tensor cores add up at the pace that other instructions leave them."""

UNIT = 512.0  # times the fp8 value: the integer


def fp8_instructions(words: range) -> str:
    """Some words of a quad -> two planes of each, four bytes each: integers of 4 bits, less 8, over UNIT. Where the
    result is negative, the lower three bits are inverted, and one is added: to all eight of a word at once."""
    lines = [".reg .b32 s, n, t, m;"]
    for index, word in enumerate(words):
        source = f"${2 * len(words) + word}"
        lines += [
            f"lop3.b32 s, {source}, 0x88888888, 0, 0x0C;",  # what is negative: not the source's top bits
            "shr.u32 n, s, 3;",
            "mul.lo.u32 t, n, 7;",
            f"lop3.b32 m, {source}, t, 0x77777777, 0x28;",  # (source ^ t) & 7
            "add.u32 m, m, n;",
            "shl.b32 t, s, 4;",
            f"lop3.b32 ${2 * index}, m, t, 0x0F0F0F0F, 0xE4;",  # the first of two where the mask is, else the second
            "shr.u32 m, m, 4;",
            f"lop3.b32 ${2 * index + 1}, m, s, 0x0F0F0F0F, 0xE4;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"
