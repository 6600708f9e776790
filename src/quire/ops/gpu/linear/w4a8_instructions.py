"""4 bits become fp8 values in registers: for w4a8.py and w4a8_wide.py.

The first sixteen fp8 values (e4m3), from 0 on, are the multiples of 2**-9: subnormal ones and the first that are
normal, and their bits are those of the integers 0 .. 15. So the magnitude of an integer is its fp8 value, and a sign
stands above."""

UNIT = 512.0  # times the fp8 value: the integer


def look_up_instructions(words: range) -> str:
    """Some words of a quad -> two planes of each, four bytes each: integers of 4 bits, less 8, over UNIT. Of a negative
    one the lower three bits are inverted, and one is added: that is done to all eight at once."""
    lines = [".reg .b32 s, n, t, m;"]
    for index, word in enumerate(words):
        source = f"${2 * len(words) + word}"
        lines += [
            f"lop3.b32 s, {source}, 0x88888888, 0, 0x0C;",  # bits of negative ones: not the source
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
