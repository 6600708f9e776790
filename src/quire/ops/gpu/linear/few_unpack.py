"""Instructions that make fp16 of words' planes and multiply them with rows of activations, for grouped_few.py.

Values are placed into the mantissa of a large float, as in unpack.py: into its lowest bits, or, of odd planes, four
bits further up, which spares every other shift. Then a zero, or a group's zero point, is subtracted together with the
large number. Where groups have offsets the large number stays: it is multiplied with the group's sum of activations, as
the offset is."""

from functools import cache
from typing import NamedTuple

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
LARGE = (0x6400, 0x5400)  # fp16 1024 and 64, of even and odd planes


class FewValues(NamedTuple):
    """How values become floats."""

    bits: int  # 4 or 8: those in words
    high_bits: int
    zero: int  # subtracted from all values
    second: str  # what a group has beside its scale: "none", "points", "offsets"


@cache
def plane_asm(plane: int, values: FewValues, tiles: int, joined: bool, chained: bool) -> str:
    """The values of a plane times the activations of `tiles` x 8 tokens. Operands: see `operands`. With `joined`, both
    halves of the words go into one sum; with `chained`, the sums are added to some."""
    results = 4 * tiles * (1 if joined else 2)
    pairs, high = results, results + (16 if values.bits == 8 else 8)
    less = high + (8 if values.high_bits else 0)
    x = less + (2 if values.second == "points" else 0)
    before = x + 4 * tiles
    lines = [".reg .f32 z;", "mov.f32 z, 0f00000000;", f".reg .f32 d<{4 * tiles}>;", ".reg .b32 a<8>;"]
    lines += [".reg .b32 h, less;", f"mov.b32 less, 0x{_less(plane, values) * 0x10001:08X};"]
    for number in range(8):
        if values.bits == 8:
            lines += _byte(f"a{number}", f"${pairs + 2 * number}", f"${pairs + 2 * number + 1}", plane)
        else:
            lines += _value(f"a{number}", f"${pairs + number}", f"${high + number}", plane, values)
        if values.second != "offsets":
            by = f"${less + number // 4}" if values.second == "points" else "less"
            lines.append(f"add.rn.f16x2 a{number}, a{number}, {by};")
    for half in range(2):
        a = f"{{a{2 * half}, a{4 + 2 * half}, a{2 * half + 1}, a{5 + 2 * half}}}"
        for tile in range(tiles):
            b = f"{{${x + 4 * tile + 2 * half}, ${x + 4 * tile + 2 * half + 1}}}"
            first = _quad("$", before + 4 * tile) if chained else "{z, z, z, z}"
            if joined:
                between = _quad("d", 4 * tile)
                to, start = (between, first) if half == 0 else (_quad("$", 4 * tile), between)
            else:
                to, start = _quad("$", 4 * (half * tiles + tile)), "{z, z, z, z}"
            lines.append(f"{MMA} {to}, {a}, {b}, {start};")
    return "{\n" + "\n".join(lines) + "\n}"


def _less(plane: int, values: FewValues) -> int:
    """-(1024 + zero), or -(64 + zero), in fp16"""
    assert values.zero < 64
    if values.bits == 8:
        return 0x8000 | LARGE[0] | 128
    return 0x8000 | LARGE[plane % 2] | values.zero << plane % 2 * 4


def _byte(to: str, first: str, second: str, plane: int) -> list[str]:
    """A signed byte of two words, + 1152"""
    pick = f"prmt.b32 {to}, {first}, {second}, 0x{plane | 4 + plane << 8:04X};"
    return [pick, f"lop3.b32 {to}, {to}, 0x00FF00FF, 0x64806480, 0x6A;"]  # (a & b) ^ c


def _value(to: str, pair: str, high: str, plane: int, values: FewValues) -> list[str]:
    """A plane of two words in 16 bits each, with further bits in 16 bits each, + the large number"""
    place = plane % 2 * 4  # of the lowest bit
    lines = [f"shr.u32 {to}, {pair}, 8;"] if plane % 4 >= 2 else []
    source = to if lines else pair
    lines.append(f"lop3.b32 {to}, {source}, 0x{(15 << place) * 0x10001:08X}, 0x{LARGE[plane % 2] * 0x10001:08X}, 0xEA;")
    if values.high_bits:
        mask = (1 << values.high_bits) - 1 << place + 4
        right = values.high_bits * plane - place - 4
        if right:
            lines.append(f"shr.u32 h, {high}, {right};" if right > 0 else f"shl.b32 h, {high}, {-right};")
        lines.append(f"lop3.b32 {to}, {'h' if right else high}, 0x{mask * 0x10001:08X}, {to}, 0xEA;")  # (a & b) | c
    return lines


def _quad(name: str, first: int) -> str:
    return "{" + ", ".join(f"{name}{first + i}" for i in range(4)) + "}"


def operands(values: FewValues, tiles: int, joined: bool, chained: bool) -> str:
    """Constraints: sums of a lane (of both halves, unless joined); four pairs of words of one row and of another, which
    share a word where they have four bits; further bits of each; zero points of both rows; x; sums that are added
    to."""
    early = "=f" if joined else "=&f"  # the first half's sums are written before the second half is read
    count = (16 if values.bits == 8 else 8) + (8 if values.high_bits else 0) + (2 if values.second == "points" else 0)
    inputs = ["r"] * (count + 4 * tiles)
    return ",".join([early] * (4 * tiles * (1 if joined else 2)) + inputs + (["f"] * 4 * tiles if chained else []))


# Sums of planes times two numbers a lane and row: of a lane's two planes, main parts and rests.
SUMS = "{ .reg .f32 z; mov.f32 z, 0f00000000; " + MMA + " {$0, $1, $2, $3}, {$4, $5, $4, $5}, {$6, $7}, {z, z, z, z}; }"

# Two bytes of a word, by a selector, as two fp16; times -1024 and -64; less 128.
TWO_BYTES = (
    "{ .reg .b32 a, m; mov.b32 m, 0xE400E400; prmt.b32 a, $1, 0x64646464, $2; add.rn.f16x2 $0, a, m; }",
    "{ .reg .b32 a, m, n; mov.b32 m, 0xE400E400; mov.b32 n, 0xD400E400; prmt.b32 a, $1, 0x64646464, $2;"
    " add.rn.f16x2 a, a, m; mul.rn.f16x2 $0, a, n; }",
    "{ .reg .b32 a, m; mov.b32 m, 0xE480E480; prmt.b32 a, $1, 0x64646464, $2; add.rn.f16x2 $0, a, m; }",
)

# Pairs of words: lower halves, upper halves. Of four bytes two pairs. Of a word with a zero point -(1024 + it) and
# -(64 + it), twice each.
PAIRS = (
    "prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;",
    "prmt.b32 $0, $2, 0, 0x4140; prmt.b32 $1, $2, 0, 0x4342;",
    "{ .reg .b32 m; mov.b32 m, 0x63806380; prmt.b32 $0, $2, 0xE4E4E4E4, 0x4242; add.rn.f16x2 $1, $0, m; }",
)

# An fp16 of a word, the lower or the upper one, as fp32.
HALF = tuple("{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, " + half + "; }" for half in "lh")
