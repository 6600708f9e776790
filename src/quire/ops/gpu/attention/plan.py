# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Who does what: runs of different lengths are cut into pieces, and the pieces numbered through. A plan is made on the
device, once a step, and serves all layers.

Decoding: all contexts, laid end to end, are cut into as many shares of one length as there are workers. Where a share
ends inside a context, that context has several pieces, which attention_merge.py puts together. So all workers are done
at the same time whatever the contexts are, and few contexts are cut. Where rows must not depend on the batch, contexts
are dealt out whole.

Prefill: a piece is a tile of neighbouring query tokens."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import Runs, num_programs

SEQS_AT_ONCE = 256  # sequences numbered at once
MIN_SPLIT_LENGTH = 128  # positions: fewer are read while a program begins and ends
SPLIT_MULTIPLE = 64  # positions: shares are multiples of it, so that programs read whole tiles
MAX_ROW_TILES = 128  # tiles of rows that a sequence's queries and heads make, at most
FIELDS = tl.constexpr(
    8
)  # of a piece: sequence, begin and end of its positions, which of the sequence's pieces, of how many
NO_PIECE = tl.constexpr(2**30)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The sequences of 1 .. max_queries tokens in this step, cut into pieces of their context. One stream at a time."""

    pieces: Tensor  # [S + workers, FIELDS] int32
    ranges: Tensor  # [workers, 2] int32: a worker's pieces, from the first to before the last
    counters: Tensor  # [S, COUNTERS] int32: pieces that are done, and 0 again when a launch ends
    max_queries: int
    window: int
    split_contexts: bool

    @property
    def workers(self) -> int:
        return len(self.ranges)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The sequences of more than `above` tokens in this step, cut into tiles of neighbouring tokens."""

    starts: Tensor  # [S + 1] int32
    tile: int  # tokens
    max_tiles: int  # of the whole step
    above: int


def num_workers(device: torch.device, per_multiprocessor: int, lanes: int, num_seqs: int, max_model_len: int) -> int:
    """Each of them is `lanes` programs, one for each KV head or tile of heads; all stay on the device."""
    most = num_seqs * -(-max_model_len // MIN_SPLIT_LENGTH)
    return max(1, num_programs(device, per_multiprocessor, most * lanes) // lanes)


def plan_decode(
    runs: Runs,
    workers: int,
    *,
    max_queries: int = 1,
    window: int = 0,
    least: int = MIN_SPLIT_LENGTH,
    split_contexts: bool = True,
) -> DecodePlan:
    like = {"dtype": torch.int32, "device": runs.context_lens.device}
    pieces = torch.empty(runs.num_seqs + workers, FIELDS.value, **like)
    ranges = torch.empty(workers, 2, **like)
    _split_contexts[(1,)](
        pieces,
        ranges,
        runs.seq_starts,
        runs.context_lens,
        runs.num_seqs,
        workers,
        LEAST=least,
        MAX_QUERIES=max_queries,
        WINDOW=window,
        SPLIT=split_contexts,
        SPLIT_MULTIPLE=SPLIT_MULTIPLE,
        SEQS_AT_ONCE=SEQS_AT_ONCE,
        num_warps=4,
    )
    counters = torch.zeros(runs.num_seqs, MAX_ROW_TILES, **like)
    return DecodePlan(pieces, ranges, counters, max_queries, window, split_contexts)


def plan_prefill(runs: Runs, num_tokens: int, tile: int, *, above: int = 0) -> PrefillPlan:
    starts = torch.empty(runs.num_seqs + 1, dtype=torch.int32, device=runs.context_lens.device)
    _number_tiles[(1,)](
        starts, runs.seq_starts, runs.context_lens, runs.num_seqs, tile, above, SEQS_AT_ONCE, num_warps=4
    )
    most = num_tokens // tile + min(runs.num_seqs, num_tokens)  # each sequence may end in a tile that is not full
    return PrefillPlan(starts, tile, most, above)


@triton.jit
def find_sequence(starts, num_runs, piece):
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
def load_piece(pieces, piece):
    """-> its sequence, begin and end of its positions, which of the sequence's pieces it is, and of how many"""
    at = pieces + piece * FIELDS
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


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


@triton.jit
def _context_spans(
    seq_starts,
    context_lens,
    seq,
    num_seqs,
    MAX_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_MULTIPLE: tl.constexpr,
):
    """-> where sequences `seq` begin to be read, and how many positions that makes, in whole units. Padding has one
    unit that is empty, so that somebody writes zeros; sequences of more tokens have none."""
    context_len, num_queries = _run_lengths(seq_starts, context_lens, seq, num_seqs)
    served = (num_queries > 0) & (num_queries <= MAX_QUERIES)
    first = first_seen(context_len, num_queries, WINDOW) // SPLIT_MULTIPLE * SPLIT_MULTIPLE
    return (
        first,
        tl.where(served, tl.cdiv(tl.maximum(context_len - first, 1), SPLIT_MULTIPLE) * SPLIT_MULTIPLE, 0),
        context_len,
    )


@triton.jit(do_not_specialize=["num_seqs", "workers"])
def _split_contexts(
    pieces,
    ranges,
    seq_starts,
    context_lens,
    num_seqs,
    workers,
    LEAST: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_MULTIPLE: tl.constexpr,
    SEQS_AT_ONCE: tl.constexpr,
):
    total = 0
    for base in range(0, num_seqs, SEQS_AT_ONCE):
        seq = base + tl.arange(0, SEQS_AT_ONCE)
        _, length, _ = _context_spans(seq_starts, context_lens, seq, num_seqs, MAX_QUERIES, WINDOW, SPLIT_MULTIPLE)
        total += tl.sum(length)
    share = tl.maximum(tl.cdiv(tl.cdiv(total, workers), SPLIT_MULTIPLE) * SPLIT_MULTIPLE, LEAST)
    for base in range(0, workers, SEQS_AT_ONCE):
        worker = base + tl.arange(0, SEQS_AT_ONCE)
        tl.store(ranges + 2 * worker, NO_PIECE, mask=worker < workers)
        tl.store(ranges + 2 * worker + 1, 0, mask=worker < workers)
    tl.debug_barrier()

    before = 0  # positions of the sequences before
    count = 0  # and their pieces
    for base in range(0, num_seqs, SEQS_AT_ONCE):
        seq = base + tl.arange(0, SEQS_AT_ONCE)
        first, length, context_len = _context_spans(
            seq_starts, context_lens, seq, num_seqs, MAX_QUERIES, WINDOW, SPLIT_MULTIPLE
        )
        begin = before + tl.cumsum(length) - length
        worker = begin // share  # of the first piece
        num_splits = tl.where(length > 0, (begin + length - 1) // share - worker + 1 if SPLIT else 1, 0)
        piece = count + tl.cumsum(num_splits) - num_splits
        for split in range(tl.max(num_splits)):
            exists = split < num_splits
            at = pieces + (piece + split) * FIELDS
            from_here = tl.maximum((worker + split) * share - begin, 0) if SPLIT else first * 0
            to_here = tl.minimum((worker + split + 1) * share - begin, length) if SPLIT else length
            tl.store(at, seq, mask=exists)
            tl.store(at + 1, first + from_here, mask=exists)
            tl.store(at + 2, tl.minimum(first + to_here, context_len), mask=exists)
            tl.store(at + 3, split + first * 0, mask=exists)
            tl.store(at + 4, num_splits, mask=exists)
            tl.atomic_min(ranges + 2 * (worker + split), piece + split, mask=exists)
            tl.atomic_max(ranges + 2 * (worker + split) + 1, piece + split + 1, mask=exists)
        before += tl.sum(length)
        count += tl.sum(num_splits)


@triton.jit(do_not_specialize=["num_seqs"])
def _number_tiles(
    starts, seq_starts, context_lens, num_seqs, TILE: tl.constexpr, ABOVE: tl.constexpr, SEQS_AT_ONCE: tl.constexpr
):
    total = 0
    for base in range(0, num_seqs, SEQS_AT_ONCE):
        seq = base + tl.arange(0, SEQS_AT_ONCE)
        context_len, num_queries = _run_lengths(seq_starts, context_lens, seq, num_seqs)
        count = tl.where((context_len > 0) & (num_queries > ABOVE), tl.cdiv(num_queries, TILE), 0)
        tl.store(starts + seq, total + tl.cumsum(count) - count, mask=seq < num_seqs)
        total += tl.sum(count)
    tl.store(starts + num_seqs, total)
