# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Activations as lanes of a warp hold them when tensor cores multiply them, for grouped_few.py.

A lane has a token, and of every 16 inputs four neighbours: those of the four words that it loads of a row of weights. A
plane of a unit of 256 inputs is 16 bytes a lane. Numbers are fp16, with a power of two as the scale of a unit: of those
up to 2**-14 of the greatest nothing is lost, and of the others less than 2**-25 of it. Beside them lie the sums of the
inputs of planes, each as two fp16."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

UNIT = 256  # inputs
TILE = 8  # tokens


class Fragments(NamedTuple):
    x: Tensor  # [tiles of tokens, units, 8 planes, 32 lanes, 4] int32: pairs of neighbours
    sums: Tensor  # [tiles of tokens, units, 32 lanes, 2] int32: two planes' main parts, and the rests
    scales: Tensor  # [tiles of tokens, units, 8] fp32


def x_fragments(x: Tensor, width: int, overlap: bool = False) -> Fragments:
    """x [M, K] in 16 bits, for weights whose chunks have `width` words (grouped_layout.py). What tokens past M would
    have is not written."""
    (M, K), tiles = x.shape, triton.cdiv(len(x), TILE)
    assert K % UNIT == 0 and x.stride(1) == 1
    fragments = x.new_empty(tiles, K // UNIT, 8, 32, 4, dtype=torch.int32)
    sums = x.new_empty(tiles, K // UNIT, 32, 2, dtype=torch.int32)
    scales = x.new_empty(tiles, K // UNIT, TILE, dtype=torch.float32)
    _fragments_kernel[(K // UNIT, M)](
        x,
        fragments.view(torch.float16),
        sums.view(torch.float16),
        scales,
        x.stride(0),
        WIDTH=width,
        OVERLAP=overlap,
        num_warps=1,
        **overlap_options(overlap),
    )
    return Fragments(fragments, sums, scales)


@triton.jit
def _fragments_kernel(x_ptr, out_ptr, sum_ptr, scale_ptr, stride, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):
    unit, token, units = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    k = tl.arange(0, 256)
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + token.to(tl.int64) * stride + unit * 256 + k).to(tl.float32)
    exponent = tl.max(tl.abs(x), axis=0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.minimum(tl.maximum(exponent, 1), 253)
    x *= (254 - exponent << 23).to(tl.float32, bitcast=True)  # below 2, or not finite, or almost so
    if WIDTH == 32:
        plane, half = k // 32, k % 32 // 16
    else:  # two chunks
        plane, half = k % 128 // 16, k // 128
    first = token // 8 * units + unit
    lane = token % 8 * 4 + k % 16 // 4
    tl.store(out_ptr + ((first * 8 + plane) * 32 + lane) * 8 + half * 4 + k % 4, x.to(tl.float16))
    tl.store(scale_ptr + first * 8 + token % 8, (exponent << 23).to(tl.float32, bitcast=True))
    if WIDTH == 32:
        sums = tl.sum(tl.reshape(x, (8, 32)), axis=1)
        main = sums.to(tl.float16)
        plane = tl.arange(0, 8)
        place = sum_ptr + (first * 32 + token % 8 * 4 + plane // 2) * 4 + plane % 2
        tl.store(place, main)
        tl.store(place + 2, (sums - main.to(tl.float32)).to(tl.float16))
