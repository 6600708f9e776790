# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Rows of activations as lanes of a warp hold them when tensor cores multiply them, for grouped_few.py.

A lane has a token of eight, and of every 16 inputs four neighbours: those of the four words that it loads of a row of
weights (grouped_layout.py). A plane of a unit of 256 inputs is 16 bytes a lane:

    q       [tiles of 8 tokens, units, 8 planes, 32 lanes, 2 halves, 4] fp16
    scales  [tiles of 8 tokens, units, 72] in 32 bits: two words for each of 32 lanes, then a scale for each token

Numbers are fp16 with a power of two as the scale of a unit: of those up to 2**-14 of the greatest nothing is lost, and
of the others less than 2**-25 of it. A lane's two words are the sums of two planes, as two fp16 each, main parts first.
Planes of 16 inputs have no sums."""

import triton
import triton.language as tl

UNIT = 256  # inputs
TOKENS = 8  # of a tile
SCALE_WORDS = 72  # of a unit
WORDS = tl.constexpr(SCALE_WORDS)


@triton.jit
def store_fragments(out_ptr, scale_ptr, y, row, first, n, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns first .. first + BLOCK of a row of n, all in whole units, for weights whose planes have WIDTH inputs. `y`
    is fp32, 0 past n. What rows past the last one would have is not written."""
    columns = first + tl.arange(0, BLOCK)
    k = columns % 256
    by_unit = tl.reshape(y, (BLOCK // 256, 256))
    exponent = tl.max(tl.abs(by_unit), axis=1).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    by_unit *= (254 - exponent << 23).to(tl.float32, bitcast=True)[:, None]  # below 2, or not finite, or almost so
    if WIDTH == 32:
        plane, half = k // 32, k % 32 // 16
    else:  # two chunks
        plane, half = k % 128 // 16, k // 128
    tile = row // 8 * (n // 256)
    lane = row % 8 * 4 + k % 16 // 4
    place = (((tile + columns // 256) * 8 + plane) * 32 + lane) * 8 + half * 4 + k % 4
    tl.store(out_ptr + place, tl.reshape(by_unit, (BLOCK,)).to(tl.float16), mask=columns < n)
    unit = first // 256 + tl.arange(0, BLOCK // 256)
    scales = (exponent << 23).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + (tile + unit) * WORDS + 64 + row % 8, scales, mask=unit < n // 256)
    if WIDTH == 32:
        sums = tl.sum(tl.reshape(by_unit, (BLOCK // 32, 32)), axis=1)
        main = sums.to(tl.float16)
        plane = first // 32 + tl.arange(0, BLOCK // 32)
        word = (tile + plane // 8) * WORDS + (row % 8 * 4 + plane % 8 // 2) * 2
        halves = scale_ptr.to(tl.pointer_type(tl.float16), bitcast=True) + word * 2 + plane % 2
        tl.store(halves, main, mask=plane < n // 32)
        tl.store(halves + 2, (sums - main.to(tl.float32)).to(tl.float16), mask=plane < n // 32)
