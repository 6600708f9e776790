"""How long a GEMM takes with tiles of one kind, so that the fastest can be taken for a shape and a number of rows.

Estimates in microseconds, fitted to sweeps on an H200 (benchmarks/results/2026-11-18-h200-matmuls-*.jsonl). Programs
that share a multiprocessor share its tensor cores: each takes `run` times their number for 256 inputs, and `alone` at
least."""

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from quire.ops.gpu.linear.linear import PROGRAMS

SPLITS = (1, 2, 4, 8)
INPUTS = 256  # of `run`
TileT = TypeVar("TileT")


class TileTime(NamedTuple):
    block_m: int  # tokens a program
    block_n: int  # outputs a program
    resident: int  # programs that share a multiprocessor
    start: float  # before the first product and after the last
    run: float
    splits: tuple[float, ...]  # for each of SPLITS: to write the sums of splits and add them up
    alone: float = 0.0

    def of(self, M: int, N: int, K: int, splits: int) -> float:
        programs = -(-M // self.block_m) * -(-N // self.block_n) * splits
        each = -(-programs // PROGRAMS)  # on a multiprocessor, in the course of time
        waves = -(-each // self.resident)
        steps = -(-K // (INPUTS * splits))
        return steps * max(self.alone, each * self.run) + waves * (self.start + self.splits[SPLITS.index(splits)])


def fastest(tiles: Mapping[TileT, TileTime], M: int, N: int, K: int) -> tuple[float, TileT, int]:
    """-> microseconds, the tile, and its splits; the first among equals"""
    steps = max(K // INPUTS, 1)
    times = [
        (time.of(M, N, K, splits), tile, splits) for tile, time in tiles.items() for splits in SPLITS if splits <= steps
    ]
    return min(times, key=lambda timed: timed[0])
