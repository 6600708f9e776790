"""Which quantized experts and how many routes the kernel of quantized_tiles.py is for, and its tiles."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.gpu.linear.grouped_config import folds
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.gpu.linear.wide_format import slab_format
from quire.ops.gpu.moe.quantized import QuantizedExperts


class WideTile(NamedTuple):
    block_m: int  # routes
    block_n: int  # rows of weights a program
    warps: int
    stages: int  # copies of activations in flight
    slabs: int = 2  # of a copy
    registers: int = 0
    group: int = 8  # tiles that take the same weights one after the other, while the L2 cache holds them
    parts: int = 2  # chunks of a span at most
    halves: bool = False  # a tile with at most half of its routes computes no more


# By the fewest routes that an expert has on average: the fastest of a sweep on an H200.
TILES = {
    6: WideTile(16, 64, 4, 4, registers=128),
    11: WideTile(32, 64, 4, 4, registers=128),
    22: WideTile(64, 64, 4, 3, registers=128, parts=1),
    48: WideTile(128, 128, 8, 3, registers=128, parts=1, halves=True),
    160: WideTile(256, 128, 8, 3, halves=True),
}
MIN_UNFOLDED = 22  # routes an expert, below which others are as fast where scales are few
LARGE_SPANS = {48: 22, 96: 160}  # tiles where the words of a span take the registers of 128 routes


def wide_tile(x: Tensor, gate_up: object, down: object, num_routes: int) -> WideTile | None:
    """None where the device, the experts or the number of routes are not for the kernel."""
    if not isinstance(gate_up, QuantizedExperts) or not isinstance(down, QuantizedExperts):
        return None
    if x.dtype != torch.bfloat16 or not has_wide_kernel(x.device):
        return None
    if slab_format(gate_up.rows) is None or slab_format(down.rows) is None:
        return None
    return tile_of(num_routes / gate_up.num_experts, gate_up.rows)


def tile_of(routes: float, weight: GroupedWeight) -> WideTile | None:
    """For so many routes an expert."""
    if routes < (min(TILES) if folds(weight) else MIN_UNFOLDED):
        return None
    least = max(least for least in TILES if routes >= least)
    more_bits = weight.high is not None or weight.bits == 8 or (weight.super_scales is not None and weight.width == 16)
    if weight.chunk == 256 or more_bits:
        least = next((other for most, other in reversed(LARGE_SPANS.items()) if routes >= most), least)
    tile = TILES[least]
    return tile._replace(registers=168) if more_bits and tile.registers else tile
