"""Which experts and how many routes the kernel of mxfp4_tiles.py is for, and its tiles."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.gpu.moe.quantized import QuantizedExperts

CHUNK = 128  # inputs: 16 words of eight values


class MXFP4Tile(NamedTuple):
    block_m: int  # routes
    stages: int  # chunks in flight
    pipelines: int = 1  # of a program, with tiles of their own
    together: int = 1  # groups of four warps that run the same instructions: 2 leave more room in the cache of those
    halves: bool = False  # a tile with at most half of its routes computes no more
    group: int = 1  # tiles that take the same weights one after the other, while the L2 cache holds them


# By the fewest routes that an expert has on average: the fastest on an H200, with random routes.
TILES = {
    7: MXFP4Tile(16, 8, pipelines=2),
    10: MXFP4Tile(32, 6, pipelines=2, together=2, halves=True),
    20: MXFP4Tile(64, 4, pipelines=2, together=2, halves=True),
    56: MXFP4Tile(128, 5, halves=True),
    200: MXFP4Tile(128, 5, halves=True, group=8),
}


def mxfp4_tile(x: Tensor, gate_up: object, down: object, num_routes: int) -> MXFP4Tile | None:
    """None where the device, the experts or the number of routes are not for the kernel."""
    if not isinstance(gate_up, QuantizedExperts) or not isinstance(down, QuantizedExperts):
        return None
    if x.dtype != torch.bfloat16 or not has_wide_kernel(x.device) or not all(map(can_stream, (gate_up, down))):
        return None
    return mxfp4_tile_of(num_routes / gate_up.num_experts)


def can_stream(experts: QuantizedExperts) -> bool:
    """Whether they are MXFP4's, in chunks of 128 inputs."""
    rows = experts.rows
    whole = rows.num_inputs % 64 == 0 and rows.num_outputs // experts.num_experts % 16 == 0
    return rows.has_exponents and rows.chunk == CHUNK and whole


def mxfp4_tile_of(routes: float) -> MXFP4Tile | None:
    """For so many routes an expert."""
    return TILES[max(least for least in TILES if routes >= least)] if routes >= min(TILES) else None
