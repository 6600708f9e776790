"""Which weights and how many rows the kernel of grouped_wide.py is for, and its tiles."""

from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.tile_times import TileTime, fastest

GROUP, WIDTH = 128, 32
MIN_ROWS, MAX_SMALL_ROWS = 33, 64
MAX_ROWS = 1024  # beyond it, dequantizing is a small part of the time, and cuBLAS is faster
MIN_DEQUANTIZED_ROWS = 257  # below it, nothing is dequantized
HOPPER = 9  # compute capability: instructions of the kernel are in no other
GLUON_VERSIONS = ("3.6",)  # of Triton. Gluon is experimental, and its names change.


class WideConfig(NamedTuple):
    block_m: int  # tokens a program
    block_n: int  # outputs a program
    splits: int  # of K
    warps: int
    stages: int  # slabs of activations in flight
    scaling: str = "bf16"
    late: bool = False  # the next words are loaded half a chunk ahead, not a whole one: fewer registers
    pending: int = 2  # planes that are multiplied while others are unpacked
    registers: int = 0
    resident: int = 1  # programs that share a multiprocessor
    polls: int = 2000  # for about so many microseconds programs of a tile wait for each other


# By the fewest rows. All scale weights as `dequantize` does.
SMALL = {
    WideConfig(64, 128, 1, 4, 6, "pair", resident=2): TileTime(64, 128, 2, 3, 1.24, (0, 3.4, 4.4, 5), 1.35),
}
LARGE = {
    WideConfig(128, 128, 1, 8, 6, "pair"): TileTime(128, 128, 1, 3.8, 1.77, (0, 3.5, 5.3, 6)),
    WideConfig(256, 128, 1, 8, 6, "pair"): TileTime(256, 128, 1, 7, 2.4, (0, 5.5, 7, 11)),
}
# The tiles of grouped_config.py, up to 64 rows and beyond.
OTHER_SMALL = TileTime(64, 128, 1, 1, 1.6, (0, 3, 4, 7))
OTHER_LARGE = TileTime(64, 64, 3, 2, 0.77, (0, 4, 6, 9), 1.0)
DEQUANTIZE_US, CUBLAS_TFLOPS = 0.76, 720.0  # a million weights; a second


def can_be_wide(weight: GroupedWeight) -> bool:
    """Integers in groups of 128, with scales in fp16 and zero points or none, in whole chunks."""
    plain = weight.group == GROUP and weight.width == WIDTH and not weight.has_offsets and weight.high is None
    scales = (torch.int32, torch.int64) if weight.bits == 4 else (torch.float16,)
    together = weight.scales.dtype in scales and weight.super_scales is None and not weight.codebook
    return plain and together and weight.num_inputs % weight.chunk == 0


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
    small = M <= MAX_SMALL_ROWS
    if not MIN_ROWS <= M <= MAX_ROWS or (small and weight.bits == 8):
        return None
    tiles = SMALL if small else LARGE
    us, tile, splits = fastest(tiles, M, N, K)
    return tile._replace(splits=splits) if us < _other_us(M, N, K, weight.bits) else None


def _other_us(M: int, N: int, K: int, bits: int) -> float:
    if M >= MIN_DEQUANTIZED_ROWS:
        return DEQUANTIZE_US * 1e-6 * N * K + 2e-6 * M * N * K / CUBLAS_TFLOPS
    # For 8 bits there are but the tiles of few rows.
    other = OTHER_LARGE if M > MAX_SMALL_ROWS and bits == 4 else OTHER_SMALL
    return fastest({"other": other}, M, N, K)[0]
