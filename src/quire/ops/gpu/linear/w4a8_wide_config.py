"""Which weights and rows the kernel of w4a8_wide.py is for, and its tiles."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.linear.tile_times import TileTime, fastest
from quire.ops.gpu.linear.wide_config import has_wide_kernel

GROUP, WIDTH = 128, 32
CHUNK = 256  # inputs that are copied at once
MIN_ROWS = 65
BLOCK_N = 128  # outputs a program


class W4A8WideConfig(NamedTuple):
    block_m: int  # tokens a program
    block_n: int  # outputs a program: 128 or 256
    splits: int  # of K
    stages: int  # chunks in flight
    ahead: bool = False


TILES = {W4A8WideConfig(128, 128, 1, 4): TileTime(128, BLOCK_N, 1, 5.2, 0.98, (0, 4.5, 7.5, 12))}


def can_be_wide(weight: GroupedWeight) -> bool:
    """Groups of 128, with scales in fp16, in whole chunks and whole tiles of outputs: 70 of them, with a bias, ended in
    an illegal instruction on an H200, and why is not known."""
    plain = weight.group == GROUP and weight.width == WIDTH and weight.scales.dtype == torch.int32
    return plain and weight.num_inputs % weight.chunk == 0 and weight.num_outputs % BLOCK_N == 0


def wide_config_of(
    x: QuantizedRows, weight: GroupedWeight, dtype: torch.dtype, others: Mapping[Any, TileTime]
) -> W4A8WideConfig | None:
    """None where the device, the weight or the rows are not for the kernel, or one of the other tiles is faster. TMA
    copies rows that begin at multiples of 16 bytes."""
    if dtype.itemsize != 2 or x.q.data_ptr() % 16 or not has_wide_kernel(x.q.device) or not can_be_wide(weight):
        return None
    return wide_config(len(x.q), weight.num_outputs, weight.num_inputs, others)


def wide_config(M: int, N: int, K: int, others: Mapping[Any, TileTime]) -> W4A8WideConfig | None:
    if M < MIN_ROWS:
        return None
    us, tile, splits = fastest(TILES, M, N, K)
    whole = K % (CHUNK * splits) == 0 and CHUNK * splits * tile.stages <= K  # every split has as many as are in flight
    return tile._replace(splits=splits) if whole and us < fastest(others, M, N, K)[0] else None
