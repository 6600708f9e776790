"""Tiles of GEMMs with weights in groups, and into how many splits the inputs go.

A program unpacks its weights and multiplies them in turn, so several of them, or two groups of four warps in one, keep
the tensor cores busy. `resident` programs share a multiprocessor: what shared memory and registers allow."""

from typing import Any, NamedTuple

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import PROGRAMS, num_splits
from quire.ops.gpu.linear.tile_times import SPLITS

MAX_PARALLEL_ROWS = 64  # beyond it, one program takes all splits of its tile where rows are to be batch invariant
MAX_FEW_ROWS = 32  # up to it, reading weights takes longest
SPLIT_COST = 4.0  # chunks that could be multiplied while the sums of splits are written and added up


class GroupedConfig(NamedTuple):
    block_m: int  # tokens a program
    block_n: int  # outputs a program
    splits: int  # of K
    serial: bool  # as in StreamConfig
    warps: int
    stages: int
    registers: int = 0  # of a thread at most, so that several programs share a multiprocessor; 0: as many as it takes
    fold: bool = False  # scales go into the weights, which are rounded to 16 bits as `dequantize` does

    @property
    def launch_options(self) -> dict[str, Any]:
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})


class Tile(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    stages: int
    resident: int
    registers: int = 0
    fold: bool = False


FEW = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)}  # block_m: (block_n, warps, stages)
# (block_m, block_n, warps, stages) for more than 32 rows where a chunk has eight groups of 32: loading their scales
# takes long, so more outputs share a program's activations. With offsets there are no registers for 64 tokens.
MANY_SCALES, MANY_SCALES_AND_OFFSETS = (64, 128, 8, 3), (32, 128, 4, 3)
# Up to so many rows, for scales of 64 inputs and more: one for each of the sums. Fewer inputs, and offsets: folded.
# The best of a sweep on an H200 (benchmarks/results/2026-11-18-h200-matmuls-sweep.jsonl).
LARGE = {64: Tile(64, 128, 8, 3, 1), 1 << 30: Tile(64, 64, 4, 2, 3, 168)}
EIGHT_BITS = {1 << 30: LARGE[64]}
FOLDED = {1 << 30: Tile(64, 64, 4, 2, 3, 168, fold=True)}


def grouped_config(
    M: int, weight: GroupedWeight, batch_invariant: bool = False, all_outputs: int | None = None
) -> GroupedConfig:
    """`all_outputs`: of the matrix that the weight has some rows of, for sums in the order of the whole one."""
    if batch_invariant or M <= MAX_FEW_ROWS:
        return _same_sums_config(M, weight, all_outputs or weight.num_outputs)
    tiles = FOLDED if folds(weight) else EIGHT_BITS if weight.bits == 8 else LARGE
    tile = next(tile for most, tile in tiles.items() if most >= M)
    programs = -(-M // tile.block_m) * -(-weight.num_outputs // tile.block_n)
    splits = best_splits(programs, weight.num_chunks, tile.resident)
    return GroupedConfig(
        tile.block_m, tile.block_n, splits, False, tile.warps, tile.stages, tile.registers, tile.fold
    )  # fmt: skip


def folds(weight: GroupedWeight) -> bool:
    """Whether scales are so many, or offsets with them, that it is cheaper to multiply weights than sums."""
    return weight.group < 64 or weight.has_offsets


def best_splits(programs: int, chunks: int, resident: int) -> int:
    """The number that is done first, when waves of programs fill the device one after the other."""

    def time(splits: int) -> float:
        waves = -(-programs * splits // (resident * PROGRAMS))
        return waves * (-(-chunks // splits) + (SPLIT_COST if splits > 1 else 0))

    return min((splits for splits in SPLITS if splits <= chunks), key=time)


def _same_sums_config(M: int, weight: GroupedWeight, num_outputs: int) -> GroupedConfig:
    """The inner sum is cut by (outputs, inputs) alone, so a row has the same bits among any number of rows."""
    splits, many = num_splits(num_outputs, weight.num_inputs), M > MAX_PARALLEL_ROWS
    small_groups = weight.group == weight.width == 32
    too_large = weight.has_offsets and weight.high is not None  # Q5_K: 128 outputs would not fit in registers
    if M > MAX_FEW_ROWS and small_groups and weight.bits == 4 and not weight.codebook and not too_large:
        block_m, block_n, warps, stages = MANY_SCALES_AND_OFFSETS if weight.has_offsets else MANY_SCALES
    else:
        max_block_m = 32 if small_groups and weight.has_offsets else 64
        block_m = next(block for block in FEW if block >= M or block == max_block_m)
        block_n, warps, stages = FEW[block_m]
    return GroupedConfig(block_m, block_n, splits, many, warps, stages)
