# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The positions whose scores are greatest, exactly: of equal scores the lower position, in ascending order.

One program selects for one token. It brackets the k-th greatest score between two integers, counting how many scores
are at or above three thresholds at a time, until it is found or exactly k are at or above the lower one. A last pass
stores the slots of these positions, in their order."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import Runs, next_power_of_two

TILE = 8192  # scores at a time: their counts fit in 16 bits
THREAD_SCORES = 16  # of a tile
COUNT_BITS = tl.constexpr(10)  # of how many of a lane's scores are at or above a threshold
MAX_TILES = 2**COUNT_BITS.value - 1
COUNT_MASK = tl.constexpr(MAX_TILES)
LEAST = tl.constexpr(-(2**31))


class SeenArgs(NamedTuple):
    lengths: Tensor
    owners: Tensor
    tables: Tensor
    table_stride: int


@dataclass(frozen=True, slots=True)
class SeenPositions:
    """The positions of its sequence that each token of a step sees, and of which it chooses `top_k`."""

    lengths: Tensor  # [T] int32: it sees positions 0 .. length; 0: it is padding
    owners: Tensor  # [T] int32: its sequence
    tables: Tensor  # [S, W] int32: the blocks of sequences
    block_size: int
    top_k: int

    @property
    def width(self) -> int:
        """The most that a token may see."""
        return int(self.tables.shape[1]) * self.block_size

    def args(self) -> SeenArgs:
        return SeenArgs(self.lengths, self.owners, self.tables, self.tables.stride(0))


def seen_positions(runs: Runs, positions: Tensor, slots: Tensor, block_size: int, top_k: int) -> SeenPositions:
    """positions and slots [T]"""
    number = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    owners = torch.searchsorted(runs.seq_starts[1:], number, right=True, out_int32=True).clamp_(max=runs.num_seqs - 1)
    return SeenPositions(torch.where(slots < 0, 0, positions + 1), owners, runs.block_tables, block_size, top_k)


def select_slots(scores: Tensor, seen: SeenPositions, tokens: range, out: Tensor) -> None:
    """scores [tokens, seen.width] int32 (`score_positions`) -> rows `tokens` of out [T, top_k] int32: the slots of the
    chosen positions in ascending order of positions, then -1."""
    assert scores.stride(1) == 1 and out.is_contiguous() and out.shape[1] == seen.top_k
    tile = min(TILE, next_power_of_two(seen.width, 32))
    assert seen.width <= MAX_TILES * tile, f"contexts of {seen.width} positions"
    _select[(len(tokens),)](
        scores,
        scores.stride(0),
        seen.args(),
        out,
        tokens.start,
        TOP_K=seen.top_k,
        BLOCK_SIZE=seen.block_size,
        TILE=tile,
        num_warps=max(tile // THREAD_SCORES // 32, 1),
    )


@triton.jit
def _slots_of(table, pos, there, BLOCK_SIZE: tl.constexpr):
    return tl.load(table + pos // BLOCK_SIZE, mask=there, other=0) * BLOCK_SIZE + pos % BLOCK_SIZE


@triton.jit
def _count(counts, NUMBER: tl.constexpr):
    """The sum of what lanes have counted of threshold NUMBER; each has several counts in one word."""
    return tl.sum((counts >> (NUMBER * COUNT_BITS)) & COUNT_MASK)


@triton.jit
def _find_threshold(scores, length, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """-> the least of the TOP_K greatest scores, or an integer that exactly as many are at or above; and how many of
    those that equal it belong to them."""
    lane = tl.arange(0, TILE)
    least = tl.full([TILE], 2**31 - 1, tl.int32)
    greatest = tl.full([TILE], LEAST, tl.int32)
    for start in tl.range(0, length, TILE, num_stages=3):
        x = tl.load(scores + start + lane, mask=start + lane < length, other=LEAST)
        greatest = tl.maximum(greatest, x)
        least = tl.minimum(least, tl.where(start + lane < length, x, 2**31 - 1))
    low = tl.min(least).to(tl.int64)  # at least TOP_K scores are at or above it
    high = tl.max(greatest).to(tl.int64) + 1  # fewer are at or above it
    at_low = length
    at_high = length * 0
    while (high - low > 1) & (at_low != TOP_K):
        gap = high - low
        first = low + gap // 4
        second = low + gap // 2
        third = low + gap * 3 // 4
        counts = tl.zeros([TILE], tl.int32)
        for start in tl.range(0, length, TILE, num_stages=3):
            x = tl.load(scores + start + lane, mask=start + lane < length, other=LEAST)
            counts += (x >= first.to(tl.int32)).to(tl.int32)
            counts += (x >= second.to(tl.int32)).to(tl.int32) << COUNT_BITS
            counts += (x >= third.to(tl.int32)).to(tl.int32) << (2 * COUNT_BITS)
        a = _count(counts, 0)
        b = _count(counts, 1)
        c = _count(counts, 2)
        at_high = tl.where(a < TOP_K, a, tl.where(b < TOP_K, b, tl.where(c < TOP_K, c, at_high)))
        high = tl.where(a < TOP_K, first, tl.where(b < TOP_K, second, tl.where(c < TOP_K, third, high)))
        at_low = tl.where(c >= TOP_K, c, tl.where(b >= TOP_K, b, tl.where(a >= TOP_K, a, at_low)))
        low = tl.where(c >= TOP_K, third, tl.where(b >= TOP_K, second, tl.where(a >= TOP_K, first, low)))
    return low.to(tl.int32), tl.where(at_low == TOP_K, length, TOP_K - at_high)


@triton.jit(do_not_specialize=["first_token"])
def _select(
    scores,
    score_row,
    seen,  # SeenArgs
    out,
    first_token,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = first_token + row
    length = tl.load(seen.lengths + token)
    table = seen.tables + tl.load(seen.owners + token).to(tl.int64) * seen.table_stride
    chosen = out + token * TOP_K
    lane = tl.arange(0, TILE)
    if length <= TOP_K:
        for start in range(0, TOP_K, TILE):
            pos = start + lane
            slot = tl.where(pos < length, _slots_of(table, pos, pos < length, BLOCK_SIZE), -1)
            tl.store(chosen + pos, slot, mask=pos < TOP_K)
    else:
        own = scores + row * score_row
        threshold, num_equal = _find_threshold(own, length, TOP_K, TILE)
        above = 0  # positions before that are above the threshold
        equal = 0  # positions before that equal it
        for start in tl.range(0, length, TILE, num_stages=3):
            pos = start + lane
            x = tl.load(own + pos, mask=pos < length, other=LEAST)
            counted = (x > threshold).to(tl.int32) + ((x == threshold).to(tl.int32) << 16)
            before = tl.cumsum(counted, 0) - counted
            equal_before = equal + (before >> 16)
            index = above + (before & 0xFFFF) + tl.minimum(equal_before, num_equal)
            taken = (x > threshold) | ((x == threshold) & (equal_before < num_equal))
            tl.store(chosen + index, _slots_of(table, pos, taken, BLOCK_SIZE), mask=taken)
            total = tl.sum(counted)
            above += total & 0xFFFF
            equal += total >> 16
