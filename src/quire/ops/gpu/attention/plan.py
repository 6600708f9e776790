# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""How attention divides a step among programs. A plan is made on the device, once a step, and serves all layers.

Decode: all contexts, laid end to end, are divided into shares of one length, one a worker. Where a share ends inside a
context, the context is split into several pieces, and merge.py merges their partial softmaxes. So all workers finish
together whatever the context lengths are, and few contexts are split. Where rows must not depend on the batch, no
context is split.

Prefill: a piece is a tile of neighbouring query tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import Runs, num_programs

SEQS_AT_ONCE = 256  # sequences numbered at once
MIN_SPLIT_LENGTH = 128  # positions: fewer are read while a program begins and ends
SPLIT_MULTIPLE = 64  # positions: shares are multiples of it, so that programs read whole tiles
MAX_ROW_TILES = 256  # tiles that the queries and heads of a sequence make
FIELDS = tl.constexpr(8)  # of a piece: sequence, begin, end, index among the sequence's splits, number of splits
NO_PIECE = tl.constexpr(2**30)


class DecodePlanArgs(NamedTuple):
    pieces: Tensor
    ranges: Tensor
    counters: Tensor
    counter_stride: int


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Pieces of the contexts of sequences with 1 .. max_queries tokens in this step. One stream uses it at a time."""

    pieces: Tensor  # [S + workers, FIELDS] int32
    ranges: Tensor  # [workers, 2] int32: the first of a worker's pieces, and the end of them
    counters: Tensor  # [S, MAX_ROW_TILES] int32: splits that are done; 0 between launches
    max_queries: int
    window: int
    split_contexts: bool

    @property
    def workers(self) -> int:
        return len(self.ranges)

    def args(self) -> DecodePlanArgs:
        return DecodePlanArgs(self.pieces, self.ranges, self.counters, self.counters.stride(0))


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Tiles of neighbouring tokens, of the sequences with more than `above` tokens in this step."""

    starts: Tensor  # [S + 1] int32: the first tile of each sequence
    tile: int  # tokens
    max_tiles: int  # of the whole step
    above: int


def num_workers(device: torch.device, per_multiprocessor: int, lanes: int, num_seqs: int, max_model_len: int) -> int:
    """A worker is `lanes` programs, one for each KV head or tile of heads. All workers fit on the device at once."""
    max_pieces = num_seqs * -(-max_model_len // MIN_SPLIT_LENGTH)
    return max(1, num_programs(device, per_multiprocessor, max_pieces * lanes) // lanes)


def plan_decode(
    runs: Runs,
    workers: int,
    *,
    max_queries: int = 1,
    window: int = 0,
    tree_places: int = 0,
    min_length: int = MIN_SPLIT_LENGTH,
    split_contexts: bool = True,
) -> DecodePlan:
    """`tree_places`: a token's position may be so many places before its own, where drafts are trees."""
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
        MIN_LENGTH=min_length,
        MAX_QUERIES=max_queries,
        WINDOW=window,
        TREE_PLACES=tree_places,
        SPLIT=split_contexts,
        MULTIPLE=SPLIT_MULTIPLE,
        SEQS=SEQS_AT_ONCE,
        num_warps=4,
    )
    counters = torch.zeros(runs.num_seqs, MAX_ROW_TILES, **like)
    return DecodePlan(pieces, ranges, counters, max_queries, window, split_contexts)


def plan_prefill(runs: Runs, num_tokens: int, tile: int, *, above: int = 0) -> PrefillPlan:
    starts = torch.empty(runs.num_seqs + 1, dtype=torch.int32, device=runs.context_lens.device)
    lengths = runs.seq_starts, runs.context_lens, runs.num_seqs
    _number_tiles[(1,)](starts, *lengths, TILE=tile, ABOVE=above, SEQS=SEQS_AT_ONCE, num_warps=4)
    max_tiles = num_tokens // tile + min(runs.num_seqs, num_tokens)  # each sequence may end in a partial tile
    return PrefillPlan(starts, tile, max_tiles, above)


@triton.jit
def find_sequence(starts, num_seqs, piece):
    """The sequence of a piece: the last one that starts at or before it. A sequence without pieces starts where the
    next one does."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= piece
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def load_piece(pieces, piece):
    """-> its sequence, begin and end of its positions, its index among the sequence's splits, and their number"""
    fields = pieces + piece * FIELDS
    return tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)


@triton.jit
def first_seen(position, WINDOW: tl.constexpr):
    """The first position that a query at `position` sees: with a window, in its chunk (WINDOW < 0), or of all."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    elif WINDOW < 0:
        first = position // -WINDOW * -WINDOW
    return first


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
    TREE_PLACES: tl.constexpr,
    MULTIPLE: tl.constexpr,
):
    """-> the first position that sequences `seq` read, how many they read, rounded up, and their contexts. A padding
    sequence has one empty piece, so that a program writes its zeros; a sequence of more than MAX_QUERIES has none."""
    context_len, num_queries = _run_lengths(seq_starts, context_lens, seq, num_seqs)
    served = (num_queries > 0) & (num_queries <= MAX_QUERIES)
    first_query = tl.maximum(context_len - num_queries - TREE_PLACES, 0)
    first = first_seen(first_query, WINDOW) // MULTIPLE * MULTIPLE
    return first, tl.where(served, tl.cdiv(tl.maximum(context_len - first, 1), MULTIPLE) * MULTIPLE, 0), context_len


@triton.jit(do_not_specialize=["num_seqs", "workers"])
def _split_contexts(
    pieces,
    ranges,
    seq_starts,
    context_lens,
    num_seqs,
    workers,
    MIN_LENGTH: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    TREE_PLACES: tl.constexpr,
    SPLIT: tl.constexpr,
    MULTIPLE: tl.constexpr,
    SEQS: tl.constexpr,
):
    total = 0
    for base in range(0, num_seqs, SEQS):
        seq = base + tl.arange(0, SEQS)
        _, length, _ = _context_spans(
            seq_starts, context_lens, seq, num_seqs, MAX_QUERIES, WINDOW, TREE_PLACES, MULTIPLE
        )
        total += tl.sum(length)
    share = tl.maximum(tl.cdiv(tl.cdiv(total, workers), MULTIPLE) * MULTIPLE, MIN_LENGTH)
    for base in range(0, workers, SEQS):
        worker = base + tl.arange(0, SEQS)
        tl.store(ranges + 2 * worker, NO_PIECE, mask=worker < workers)
        tl.store(ranges + 2 * worker + 1, 0, mask=worker < workers)
    tl.debug_barrier()

    before = 0  # positions of the sequences before
    count = 0  # pieces of the sequences before
    for base in range(0, num_seqs, SEQS):
        seq = base + tl.arange(0, SEQS)
        first, length, context_len = _context_spans(
            seq_starts, context_lens, seq, num_seqs, MAX_QUERIES, WINDOW, TREE_PLACES, MULTIPLE
        )
        begin = before + tl.cumsum(length) - length
        worker = begin // share  # of the first piece
        num_splits = tl.where(length > 0, (begin + length - 1) // share - worker + 1 if SPLIT else 1, 0)
        piece = count + tl.cumsum(num_splits) - num_splits
        for split in range(tl.max(num_splits)):
            exists = split < num_splits
            fields = pieces + (piece + split) * FIELDS
            from_here = tl.maximum((worker + split) * share - begin, 0) if SPLIT else first * 0
            to_here = tl.minimum((worker + split + 1) * share - begin, length) if SPLIT else length
            tl.store(fields, seq, mask=exists)
            tl.store(fields + 1, first + from_here, mask=exists)
            tl.store(fields + 2, tl.minimum(first + to_here, context_len), mask=exists)
            tl.store(fields + 3, split + first * 0, mask=exists)
            tl.store(fields + 4, num_splits, mask=exists)
            tl.atomic_min(ranges + 2 * (worker + split), piece + split, mask=exists)
            tl.atomic_max(ranges + 2 * (worker + split) + 1, piece + split + 1, mask=exists)
        before += tl.sum(length)
        count += tl.sum(num_splits)


@triton.jit(do_not_specialize=["num_seqs"])
def _number_tiles(
    starts, seq_starts, context_lens, num_seqs, TILE: tl.constexpr, ABOVE: tl.constexpr, SEQS: tl.constexpr
):
    total = 0
    for base in range(0, num_seqs, SEQS):
        seq = base + tl.arange(0, SEQS)
        context_len, num_queries = _run_lengths(seq_starts, context_lens, seq, num_seqs)
        count = tl.where((context_len > 0) & (num_queries > ABOVE), tl.cdiv(num_queries, TILE), 0)
        tl.store(starts + seq, total + tl.cumsum(count) - count, mask=seq < num_seqs)
        total += tl.sum(count)
    tl.store(starts + num_seqs, total)
