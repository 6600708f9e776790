"""Which weights and how many rows the kernel of grouped_wide.py is for, and its tiles."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.ops.gpu.linear.grouped_config import folds
from quire.ops.gpu.linear.grouped_gemv import can_gemv
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.tile_times import TileTime, fastest
from quire.ops.gpu.linear.wide_format import high_bits, wide_format

MIN_ROWS, MAX_SMALL_ROWS = 33, 64
MAX_FEWEST_ROWS, MAX_FEW_ROWS = 16, 32  # of formats whose other tiles are slow
MAX_ROWS = 1024  # beyond it, dequantizing is a small part of the time, and cuBLAS is faster
MIN_DEQUANTIZED_ROWS = 257  # below it, nothing is dequantized
HOPPER = 9  # compute capability: instructions of the kernel are in no other
GLUON_VERSIONS = ("3.6",)  # of Triton. Gluon is experimental, and its names change.


class WideConfig(NamedTuple):
    block_m: int  # tokens a program
    block_n: int  # outputs a program
    splits: int  # of K
    warps: int
    stages: int  # copies of activations in flight
    slab: int = 128  # inputs of a copy
    registers: int = 0
    resident: int = 1  # programs that share a multiprocessor
    polls: int = 2000  # for about so many microseconds programs of a tile wait for each other


Tiles = dict[WideConfig, TileTime]
NEVER = 1e9  # a tile of 64 outputs has too few for eight programs to share
MIN_SHARE = 16  # outputs

# By the fewest rows, with times of 4 bits in groups of 128.
FEWEST: Tiles = {WideConfig(16, 128, 1, 4, 4, resident=2): TileTime(16, 128, 2, 3, 1.05, (0, 3.4, 4.4, 5), 1.2)}
FEW: Tiles = {
    WideConfig(32, 64, 1, 4, 4, registers=128, resident=4): TileTime(32, 64, 4, 3, 0.6, (0, 3.4, 4.4, NEVER), 1.2)
}
SMALL: Tiles = {WideConfig(64, 128, 1, 4, 3, resident=2): TileTime(64, 128, 2, 3, 1.24, (0, 3.4, 4.4, 5), 1.35)}
FIVE_BITS: Tiles = {  # smaller tiles, or more warps, that take fewer registers
    WideConfig(64, 64, 1, 4, 3, registers=168, resident=3): TileTime(64, 64, 3, 3, 0.62, (0, 3.4, 4.4, NEVER), 1.34)
}
SIX_BITS: Tiles = {
    WideConfig(64, 128, 1, 8, 3, registers=128, resident=2): TileTime(64, 128, 2, 3, 1.24, (0, 3.4, 4.4, 5), 1.35)
}
LARGE: Tiles = {
    WideConfig(128, 128, 1, 8, 3): TileTime(128, 128, 1, 3.8, 1.77, (0, 3.5, 5.3, 6)),
    WideConfig(256, 128, 1, 8, 3): TileTime(256, 128, 1, 7, 2.4, (0, 5.5, 7, 11)),
}
# The tiles of grouped_config.py, up to 64 rows and beyond, and of formats whose scales go into the weights.
OTHER_SMALL = TileTime(64, 128, 1, 1, 1.6, (0, 3, 4, 7))
OTHER_LARGE = TileTime(64, 64, 3, 2, 0.77, (0, 4, 6, 9), 1.0)
OTHER_FOLDED = TileTime(64, 64, 3, 4, 1.0, (0, 2, 3, 5), 1.6)
DEQUANTIZE_US, CUBLAS_TFLOPS = 0.76, 720.0  # a million weights; a second


def can_be_wide(weight: GroupedWeight) -> bool:
    return wide_format(weight) is not None


@cache
def has_wide_kernel(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or not triton.__version__.startswith(GLUON_VERSIONS):
        return False
    return bool(torch.cuda.get_device_capability(device)[0] == HOPPER)


def wide_config_of(x: Tensor, weight: GroupedWeight) -> WideConfig | None:
    """None where the device, the weight or the rows are not for the kernel, or another one is faster. TMA copies rows
    that begin at multiples of 16 bytes."""
    if x.dtype != torch.bfloat16 or not x.is_contiguous() or x.data_ptr() % 16 or not has_wide_kernel(x.device):
        return None
    return wide_config(len(x), weight) if can_be_wide(weight) else None


def wide_config(M: int, weight: GroupedWeight) -> WideConfig | None:
    """The tiles that are estimated to be fastest; None: another kernel is faster."""
    N, K = weight.num_outputs, weight.num_inputs
    tiles = _tiles(M, weight)
    if tiles is None:
        return None
    times = {tile: _scaled(time, _slower(weight, tile.block_m)) for tile, time in tiles.items()}
    us, tile, splits = fastest(times, M, N, K)
    return tile._replace(splits=splits) if M <= MAX_FEW_ROWS or us < _other_us(M, weight) else None


def _tiles(M: int, weight: GroupedWeight) -> Tiles | None:
    if M > MAX_ROWS or (M < MIN_ROWS and not _for_few_rows(M, weight)):
        return None
    if M > MAX_SMALL_ROWS:
        return LARGE
    if M <= MAX_FEW_ROWS:
        return FEWEST if M <= MAX_FEWEST_ROWS else FEW
    return {0: SMALL, 1: FIVE_BITS, 2: SIX_BITS}[high_bits(weight)]


def _for_few_rows(M: int, weight: GroupedWeight) -> bool:
    """Offsets, and more than four bits, take long elsewhere. One row has a kernel of its own."""
    slow = weight.bits == 4 and (weight.has_offsets or weight.high is not None)
    return slow and (M > 1 or not can_gemv(weight))


def _slower(weight: GroupedWeight, block_m: int = 256) -> float:
    """How much longer than 4 bits in groups of 128 a span takes: more scales, offsets, more bits. The fewer tokens a
    tile has, the less there is to do while weights are unpacked."""
    if weight.bits == 8:
        return 1.3 if folds(weight) else 1.2 if block_m <= 64 else 1.12
    if weight.high is not None:
        return 1.5 if block_m <= 64 else 1.4 if block_m == 128 else 1.22
    return 1.08 if folds(weight) else 1.0


def _scaled(time: TileTime, by: float) -> TileTime:
    return time._replace(run=time.run * by, alone=time.alone * by)


def _other_us(M: int, weight: GroupedWeight) -> float:
    N, K = weight.num_outputs, weight.num_inputs
    if M >= MIN_DEQUANTIZED_ROWS:
        return _slower(weight) * DEQUANTIZE_US * 1e-6 * N * K + 2e-6 * M * N * K / CUBLAS_TFLOPS
    if folds(weight):
        other = _scaled(OTHER_FOLDED, _slower(weight))
    else:  # for 8 bits there are but the tiles of few rows
        other = OTHER_LARGE if M > MAX_SMALL_ROWS and weight.bits == 4 else OTHER_SMALL
    return fastest({"other": other}, M, N, K)[0]
