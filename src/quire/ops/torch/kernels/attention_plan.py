# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Who does what: runs of different lengths are cut into pieces, and the pieces numbered through.

The host knows how many pieces there may be, the device how many there are. A plan is made once a step and serves all
layers: starts [S + 1], where sequence s has the pieces starts[s] .. starts[s + 1]. A piece of decoding is a split, a
range of `split` positions that begins at a multiple of it, whatever else is in the batch; one of prefill is a tile of
neighbouring query tokens."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.torch.kernels.attention_pages import Runs

CHUNK = 256  # sequences numbered at once
SPLIT = 512  # positions
FEW_SEQS, MANY_SEQS = 16, 128  # from which on splits are twice and four times as long
MOST_SPLITS = 64  # of one sequence: bounds the memory for what splits leave to be merged


COUNTERS = 128  # tiles of rows that a sequence's queries and heads make, at most


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The sequences of 1 .. max_queries tokens in this step, cut into splits of their context. One stream at a time."""

    starts: Tensor  # [S + 1] int32
    counters: Tensor  # [S, COUNTERS] int32: parts that are done, and 0 again when a launch ends
    split: int  # positions
    max_splits: int  # of one sequence
    max_queries: int
    window: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The sequences of more than `above` tokens in this step, cut into tiles of neighbouring tokens."""

    starts: Tensor  # [S + 1] int32
    tile: int  # tokens
    max_tiles: int  # of the whole step
    above: int


def split_size(max_model_len: int, num_seqs: int = 1, batch_invariant: bool = True) -> int:
    """A split takes some microseconds to begin and to end, so where sequences alone keep the device busy they are long.
    If batch invariant, it depends on nothing that changes while an engine runs: a row's sums are cut in the same places
    every time. That costs up to a third of the speed."""
    least = max(SPLIT, 1 << ((max_model_len - 1) // MOST_SPLITS).bit_length())
    if batch_invariant or num_seqs < FEW_SEQS:
        return least
    return max(least, 2 * SPLIT if num_seqs < MANY_SEQS else 4 * SPLIT)


def plan_decode(
    runs: Runs,
    max_model_len: int,
    *,
    max_queries: int = 1,
    window: int = 0,
    split: int | None = None,
    batch_invariant: bool = True,
) -> DecodePlan:
    split = split or split_size(max_model_len, runs.num_seqs, batch_invariant)
    max_splits = -(-max_model_len // split)
    if window:  # what a window spans may begin and end inside a split
        max_splits = min(max_splits, -(-(window + max_queries - 1) // split) + 1)
    starts = torch.empty(runs.num_seqs + 1, dtype=torch.int32, device=runs.context_lens.device)
    _number_splits[(1,)](
        starts, runs.seq_starts, runs.context_lens, runs.num_seqs, split, max_queries, window, CHUNK, num_warps=4
    )
    counters = torch.zeros(runs.num_seqs, COUNTERS, dtype=torch.int32, device=starts.device)
    return DecodePlan(starts, counters, split, max_splits, max_queries, window)


def plan_prefill(runs: Runs, num_tokens: int, tile: int, *, above: int = 0) -> PrefillPlan:
    starts = torch.empty(runs.num_seqs + 1, dtype=torch.int32, device=runs.context_lens.device)
    _number_tiles[(1,)](starts, runs.seq_starts, runs.context_lens, runs.num_seqs, tile, above, CHUNK, num_warps=4)
    most = num_tokens // tile + min(runs.num_seqs, num_tokens)  # each sequence may end in a tile that is not full
    return PrefillPlan(starts, tile, most, above)


@triton.jit
def find_run(starts, num_runs, piece):
    """The sequence that a piece belongs to: the last one that starts at or before it. Those without pieces start
    where the next one does."""
    low = 0
    high = num_runs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= piece
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def first_seen(context_len, num_queries, WINDOW: tl.constexpr):
    """The first position that the first of the last `num_queries` positions sees."""
    if WINDOW == 0:
        return context_len * 0
    return tl.maximum(context_len - num_queries - WINDOW + 1, 0)


@triton.jit
def _run_lengths(seq_starts, context_lens, seq, num_seqs):
    """-> the contexts and the numbers of queries of sequences `seq`."""
    inside = seq < num_seqs
    context_len = tl.load(context_lens + seq, mask=inside, other=0)
    begin = tl.load(seq_starts + seq, mask=inside, other=0)
    end = tl.load(seq_starts + seq + 1, mask=inside, other=0)
    return context_len, end - begin


@triton.jit(do_not_specialize=["num_seqs"])
def _number_splits(
    starts,
    seq_starts,
    context_lens,
    num_seqs,
    SPLIT: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    total = 0
    for base in range(0, num_seqs, CHUNK):
        seq = base + tl.arange(0, CHUNK)
        context_len, num_queries = _run_lengths(seq_starts, context_lens, seq, num_seqs)
        served = (num_queries > 0) & (num_queries <= MAX_QUERIES)
        skipped = first_seen(context_len, num_queries, WINDOW) // SPLIT
        count = tl.where(served, tl.cdiv(tl.maximum(context_len, 1), SPLIT) - skipped, 0)  # padding: one that is empty
        tl.store(starts + seq, total + tl.cumsum(count) - count, mask=seq < num_seqs)
        total += tl.sum(count)
    tl.store(starts + num_seqs, total)


@triton.jit(do_not_specialize=["num_seqs"])
def _number_tiles(
    starts, seq_starts, context_lens, num_seqs, TILE: tl.constexpr, ABOVE: tl.constexpr, CHUNK: tl.constexpr
):
    total = 0
    for base in range(0, num_seqs, CHUNK):
        seq = base + tl.arange(0, CHUNK)
        context_len, num_queries = _run_lengths(seq_starts, context_lens, seq, num_seqs)
        count = tl.where((context_len > 0) & (num_queries > ABOVE), tl.cdiv(num_queries, TILE), 0)
        tl.store(starts + seq, total + tl.cumsum(count) - count, mask=seq < num_seqs)
        total += tl.sum(count)
    tl.store(starts + num_seqs, total)
