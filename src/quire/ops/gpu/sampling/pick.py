# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Weights of all tiles, and the draw: the token at which the running total, in the order of ids, passes the number."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.sampling.job import (
    FIELDS,
    FLAGS,
    GREEDY,
    INVERSE_TEMPERATURE,
    MIN_WEIGHT,
    NUM_TOKENS,
    PENALIZED,
    SAMPLE,
    SEED,
    SEEN,
    Job,
    load_line,
    needs_edits,
)
from quire.ops.gpu.sampling.philox import uniform_below
from quire.ops.gpu.sampling.softmax_weights import (
    NOTHING,
    finite_peak,
    greatest_of_tiles,
    load_tiles,
    ordered,
    packed_id,
    packed_key,
    weigh,
)
from quire.ops.opset import BROKEN as BROKEN_TOKEN

BROKEN = tl.constexpr(BROKEN_TOKEN)


def sum_weights(job: Job) -> None:
    """job.peaks -> job.sums, for lines whose tokens all may be drawn, min_p apart."""
    _sum_weights[(job.tiles, job.lines)](*job.source, job.sums, job.vocab, **job.options)


def pick(job: Job, tokens: Tensor, last: Tensor, *, sampled: bool) -> None:
    """Draws: tokens [lines] and last [rows], both int32, are written, and the rows' states advanced."""
    _pick[(job.lines,)](
        *job.source,
        job.marks,
        job.edits.allowed_peaks if job.edits else None,
        job.sums,
        job.filters.cutoffs if job.filters else None,
        tokens,
        last,
        job.vocab,
        job.tiles,
        HAS_MARKS=job.marks is not None,
        SAMPLED=sampled,
        FILTERED=job.filters is not None,
        **job.options,
    )


@triton.jit
def may_be_drawn(weight, params_of_row):
    """Whether min_p leaves it. A weight of 0 is left, and never drawn."""
    return weight >= tl.load(params_of_row + MIN_WEIGHT)


@triton.jit
def _sum_weights(
    logits,
    stride,
    rows,
    fields,
    edited,
    peaks,  # [lines, tiles]
    sums,  # [lines, tiles]
    vocab,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    line = tl.num_programs(1) - 1 - tl.program_id(1)  # backwards: the last lines are still in the cache
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        return
    at = fields + row * FIELDS
    if (tl.load(at + FLAGS) & GREEDY) != 0:
        return
    best = greatest_of_tiles(peaks, line, num_tiles)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_line(logits, stride, edited, needs_edits(at), line, ids, vocab, EDITED)
    weight = weigh(x, finite_peak(best), tl.load(at + INVERSE_TEMPERATURE).to(tl.float64, bitcast=True))
    weight = tl.where(may_be_drawn(weight, at), weight, 0)
    tl.store(sums + line * num_tiles + tile, tl.sum(weight, axis=0))


@triton.jit
def _pick(
    logits,
    stride,
    rows,
    fields,
    edited,
    peaks,  # [lines, tiles]
    marks,
    allowed_peaks,
    sums,  # [lines, tiles]
    cutoffs,  # [lines, 2]
    tokens,  # [lines]
    last,  # [rows]
    vocab,
    num_tiles,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
    HAS_MARKS: tl.constexpr,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
):
    line = tl.program_id(0)
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        tl.store(tokens + line, 0)
        return
    at = fields + row * FIELDS
    flags, position = tl.load(at + FLAGS), tl.load(at + NUM_TOKENS)
    is_edited = needs_edits(at)  # asked before the state advances: a barrier lies between, in the search for the best
    greedy = (flags & GREEDY) != 0
    best = greatest_of_tiles(peaks, line, num_tiles)
    if EDITED and (packed_key(best) == NOTHING) & is_edited:
        best = greatest_of_tiles(allowed_peaks, line, num_tiles)  # all is masked: the best that is allowed
        greedy = greedy | True
    if packed_key(best) == NOTHING:
        tl.store(tokens + line, BROKEN)
        tl.store(last + row, 0)  # whoever goes on from here is thrown away, and reads inside its tables
        return
    token = packed_id(best)
    if SAMPLED and greedy == 0:
        of_tile = load_tiles(sums, line, num_tiles, 0)
        below = uniform_below(tl.load(at + SEED), position, tl.load(at + SAMPLE), tl.sum(of_tile, axis=0))
        passed = tl.cumsum(of_tile, axis=0) <= below
        below -= tl.sum(tl.where(passed, of_tile, 0), axis=0)
        first = tl.sum(passed.to(tl.int32), axis=0) * TILE
        ids = first + tl.arange(0, TILE)
        x = load_line(logits, stride, edited, is_edited, line, ids, vocab, EDITED)
        weight = weigh(x, finite_peak(best), tl.load(at + INVERSE_TEMPERATURE).to(tl.float64, bitcast=True))
        drawn = may_be_drawn(weight, at)
        if FILTERED:
            key, last_key, last_id = ordered(x), tl.load(cutoffs + line * 2), tl.load(cutoffs + line * 2 + 1)
            drawn = drawn & ((key > last_key) | ((key == last_key) & (ids <= last_id)))
        running = tl.cumsum(tl.where(drawn, weight, 0), axis=0)
        token = first + tl.sum((running <= below).to(tl.int32), axis=0)
    tl.store(tokens + line, token)
    tl.store(last + row, token)
    tl.store(at + NUM_TOKENS, position + 1)
    if HAS_MARKS and (flags & PENALIZED) != 0:
        mark = marks + row * vocab + token
        tl.store(mark, (tl.load(mark) | SEEN) + 1)
