"""Instructions that make bf16 weights of words and multiply them with rows of activations, for grouped_few.py.

Values are placed into the mantissa of a large float, as in unpack.py. A zero, or a group's zero point, is subtracted
with the large number. Where groups have offsets the large number stays: it is multiplied with the group's sum of
activations, as the offset is."""

from functools import cache
from typing import NamedTuple

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
BF16 = {16: 0x4180, 32: 0x4200, 128: 0x4300}


class FewValues(NamedTuple):
    """How values become floats."""

    high_bits: int
    zero: int  # subtracted from all values
    second: str  # what a group has beside its scale: "none", "points", "offsets"

    @property
    def large(self) -> int:
        """The float that values are added to, and that is left where groups have offsets."""
        return 16 << self.high_bits if self.second == "offsets" else 128

    @property
    def place(self) -> int:
        """The bit of the float that is worth 1."""
        return {16: 3, 32: 2, 128: 0}[self.large]


@cache
def plane_asm(plane: int, values: FewValues, tiles: int, joined: bool, chained: bool) -> str:
    """The values of a plane times the activations of `tiles` x 8 tokens. Operands: see `operands`. With `joined`, both
    halves of the words go into one sum; with `chained`, the sums are added to some."""
    results = 4 * tiles * (1 if joined else 2)
    pairs, high = results, results + 8
    less = high + (8 if values.high_bits else 0)
    x = less + (2 if values.second == "points" else 0)
    before = x + 4 * tiles
    constants = [".reg .f32 z;", "mov.f32 z, 0f00000000;", f".reg .f32 d<{4 * tiles}>;", ".reg .b32 a<8>;"]
    lines = [*constants, ".reg .b32 h, one, less;", "mov.b32 one, 0x3F803F80;"]
    lines.append(f"mov.b32 less, 0x{(0x8000 | 0x4300 | values.zero) * 0x10001:08X};")
    for number in range(8):
        lines += _value(f"a{number}", f"${pairs + number}", f"${high + number}", plane, values)
        if values.second != "offsets":
            by = f"${less + number // 4}" if values.second == "points" else "less"
            lines.append(f"fma.rn.bf16x2 a{number}, a{number}, one, {by};")
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


def _value(to: str, pair: str, high: str, plane: int, values: FewValues) -> list[str]:
    """A plane of two words in 16 bits each, with further bits in 16 bits each, + the large number"""
    mask, large = 15 << values.place, BF16[values.large]
    lines = [_shift(to, pair, 4 * (plane % 4) - values.place)]
    lines.append(f"lop3.b32 {to}, {to}, 0x{mask * 0x10001:08X}, 0x{large * 0x10001:08X}, 0xEA;")  # (a & b) | c
    if values.high_bits:
        mask = (1 << values.high_bits) - 1 << values.place + 4
        lines.append(_shift("h", high, values.high_bits * plane - values.place - 4))
        lines.append(f"lop3.b32 {to}, h, 0x{mask * 0x10001:08X}, {to}, 0xEA;")
    return lines


def _shift(to: str, word: str, right: int) -> str:
    if right == 0:
        return f"mov.b32 {to}, {word};"
    return f"shr.u32 {to}, {word}, {right};" if right > 0 else f"shl.b32 {to}, {word}, {-right};"


def _quad(name: str, first: int) -> str:
    return "{" + ", ".join(f"{name}{first + i}" for i in range(4)) + "}"


def operands(values: FewValues, tiles: int, joined: bool, chained: bool) -> str:
    """Constraints: sums of a lane (of both halves, unless joined); four pairs of words of one row and of another;
    further bits of each; zero points of both rows; x; sums that are added to."""
    early = "=f" if joined else "=&f"  # the first half's sums are written before the second half is read
    inputs = ["r"] * (8 + (8 if values.high_bits else 0) + (2 if values.second == "points" else 0) + 4 * tiles)
    return ",".join([early] * (4 * tiles * (1 if joined else 2)) + inputs + (["f"] * 4 * tiles if chained else []))


# Sums of groups times two numbers a lane and row: a lane's two groups, main parts and rests.
SUMS = "{ .reg .f32 z; mov.f32 z, 0f00000000; " + MMA + " {$0, $1, $2, $3}, {$4, $5, $4, $5}, {$6, $7}, {z, z, z, z}; }"


def two_bytes(times: int) -> str:
    """Two bytes of a word below 128, by a selector, as two bf16 times a power of two, negative; 1: as they are"""
    factor, rest = {1: (0x3F80, 0xC300), -16: (0xC180, 0x4500), -32: (0xC200, 0x4580)}[times]
    both = f"mov.b32 m, 0x{factor * 0x10001:08X}; mov.b32 n, 0x{rest * 0x10001:08X};"
    return "{ .reg .b32 a, m, n; " + both + " prmt.b32 a, $1, 0x43434343, $2; fma.rn.bf16x2 $0, a, m, n; }"
