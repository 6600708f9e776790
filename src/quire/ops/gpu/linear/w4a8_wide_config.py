"""Which weights and rows the kernel of w4a8_wide.py is for, and its tiles."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import PROGRAMS
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.linear.tile_times import SPLITS, TileTime, fastest
from quire.ops.gpu.linear.wide_config import has_wide_kernel

GROUP, WIDTH = 128, 32
CHUNK = 256  # inputs that are copied at once
MIN_ROWS = 33
MIN_OUTPUTS = 128  # of a tile


class W4A8WideConfig(NamedTuple):
    block_m: int  # tokens a program
    block_n: int  # outputs a program
    splits: int  # of K
    stages: int  # chunks in flight


class WideTime(NamedTuple):
    """Microseconds, measured on an H200. A program takes a tile after the other."""

    start: float  # before the first product and after the last
    run: float  # for a chunk
    between: float  # two tiles
    splits: tuple[float, ...]  # for each of SPLITS: to write the sums of splits and add them up

    def of(self, tile: W4A8WideConfig, M: int, N: int, K: int, splits: int) -> float:
        tiles = -(-M // tile.block_m) * -(-N // tile.block_n) * splits
        each = K // (CHUNK * splits) * self.run + self.splits[SPLITS.index(splits)] + self.between
        return self.start - self.between + -(-tiles // PROGRAMS) * each


TILES = {
    W4A8WideConfig(64, 256, 1, 4): WideTime(6, 1.33, 4, (0,)),
    W4A8WideConfig(128, 128, 1, 4): WideTime(5, 0.905, 1.6, (0, 4.6, 6.3)),
}


def can_be_wide(weight: GroupedWeight) -> bool:
    """Groups of 128, with scales in fp16, in whole chunks and whole tiles of outputs: 70 of them, with a bias, ended in
    an illegal instruction on an H200, and why is not known."""
    plain = weight.group == GROUP and weight.width == WIDTH and weight.scales.dtype == torch.int32
    return plain and weight.num_inputs % weight.chunk == 0 and weight.num_outputs % MIN_OUTPUTS == 0


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
    configs = [tile._replace(splits=splits) for tile in TILES for splits in splits_of(tile, N, K)]
    if not configs:
        return None
    times = {config: TILES[config._replace(splits=1)].of(config, M, N, K, config.splits) for config in configs}
    best = min(configs, key=times.__getitem__)
    return best if times[best] < fastest(others, M, N, K)[0] else None


def splits_of(tile: W4A8WideConfig, N: int, K: int) -> list[int]:
    """Into how many a tile's inputs may go: all splits have as many chunks."""
    if N % tile.block_n:
        return []
    return [splits for splits in SPLITS[: len(TILES[tile].splits)] if K % (CHUNK * splits) == 0]
