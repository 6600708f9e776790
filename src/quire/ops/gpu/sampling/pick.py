# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The race among the tokens that passed all filters: the first of each tile, and then the sampled token."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.sampling.job import (
    FIELDS,
    FLAGS,
    GREEDY,
    INVERSE_TEMPERATURE,
    MAX_TILES,
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
from quire.ops.gpu.sampling.race import NEVER, finish_times
from quire.ops.gpu.sampling.softmax_weights import (
    MAX_ID,
    NEG_INF_KEY,
    finite_max,
    line_max,
    load_tiles,
    ordered_key,
    softmax_weight,
    unpack_id,
    unpack_key,
)
from quire.ops.sampled_row import BROKEN as BROKEN_TOKEN

BROKEN = tl.constexpr(BROKEN_TOKEN)


def race(job: Job) -> None:
    """job.tile_maxima, and the cutoffs of lines with filters -> job.tile_times."""
    _race[(job.tiles, job.lines)](job.line_args, job.tile_times, job.filters, job.vocab, **job.options)


def pick(job: Job, tokens: Tensor, last: Tensor, *, sampled: bool, advances: bool) -> None:
    """Write the sampled tokens [lines], int32. If it advances the states of the rows, every row has one line, and
    last [rows], int32, is written, too."""
    _pick[(job.lines,)](
        job.line_args,
        job.marks,
        job.edits.allowed_maxima if job.edits else None,
        job.tile_times,
        job.filters,
        tokens,
        last,
        job.vocab,
        job.tiles,
        int(advances),
        SAMPLED=sampled,
        **job.options,
    )


@triton.jit
def passes_min_p(weight, row_params):
    """A weight of 0 passes, and is never sampled."""
    return weight >= tl.load(row_params + MIN_WEIGHT)


@triton.jit
def _times(
    lines,  # LineArgs
    line,
    row_params,
    position,
    is_edited,
    best,
    filters,  # Filters, or None
    ids,
    vocab,
    EDITED: tl.constexpr,
):
    """When tokens `ids` of a line finish. best: the line's greatest logit, packed"""
    x = load_line(lines, is_edited, line, ids, vocab, EDITED)
    weight = softmax_weight(x, finite_max(best), tl.load(row_params + INVERSE_TEMPERATURE).to(tl.float64, bitcast=True))
    runs = passes_min_p(weight, row_params)
    if filters is not None:
        key, last_key = ordered_key(x), tl.load(filters.cutoffs + line * 2)
        last_id = tl.load(filters.cutoffs + line * 2 + 1)
        runs = runs & ((key > last_key) | ((key == last_key) & (ids <= last_id)))
    return finish_times(tl.load(row_params + SEED), position, tl.load(row_params + SAMPLE), ids, weight, runs)


@triton.jit
def _race(
    lines,  # LineArgs
    tile_times,  # [lines, tiles]
    filters,  # Filters, or None
    vocab,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, num_tiles = tl.program_id(0), tl.num_programs(0)
    line = tl.num_programs(1) - 1 - tl.program_id(1)  # backwards: the last lines are still in the cache
    row = tl.load(lines.rows + line).to(tl.int64)
    if row < 0:
        return
    row_params = lines.params + row * FIELDS
    best = line_max(lines.tile_maxima, line, num_tiles)
    if ((tl.load(row_params + FLAGS) & GREEDY) != 0) | (unpack_key(best) == NEG_INF_KEY):
        return
    cutoff = tl.load(filters.cutoffs + line * 2) if filters is not None else NEG_INF_KEY
    if unpack_key(tl.load(lines.tile_maxima + line * num_tiles + tile)) < cutoff:  # few tiles have tokens that passed
        tl.store(tile_times + line * num_tiles + tile, NEVER)
        return
    ids = tile * TILE + tl.arange(0, TILE)
    position = tl.load(row_params + NUM_TOKENS) + tl.load(lines.depths + line)
    is_edited = needs_edits(row_params)
    times = _times(lines, line, row_params, position, is_edited, best, filters, ids, vocab, EDITED)
    tl.store(tile_times + line * num_tiles + tile, tl.min(times, axis=0))


@triton.jit(do_not_specialize=["advances"])
def _pick(
    lines,  # LineArgs
    marks,
    allowed_maxima,
    tile_times,  # [lines, tiles]
    filters,  # Filters, or None
    tokens,  # [lines]
    last,  # [rows]
    vocab,
    num_tiles,
    advances,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    line = tl.program_id(0)
    row = tl.load(lines.rows + line).to(tl.int64)
    if row < 0:
        tl.store(tokens + line, 0)
        return
    row_params = lines.params + row * FIELDS
    flags, num_tokens = tl.load(row_params + FLAGS), tl.load(row_params + NUM_TOKENS)
    position = num_tokens + tl.load(lines.depths + line)
    is_edited = needs_edits(row_params)  # before the state advances: `line_max` has a barrier between
    greedy = (flags & GREEDY) != 0
    best = line_max(lines.tile_maxima, line, num_tiles)
    if EDITED and (unpack_key(best) == NEG_INF_KEY) & is_edited:
        best = line_max(allowed_maxima, line, num_tiles)  # everything is masked: the best allowed token
        greedy = greedy | True
    if unpack_key(best) == NEG_INF_KEY:
        tl.store(tokens + line, BROKEN)
        if advances != 0:
            tl.store(last + row, 0)  # a next step of this row is discarded, and must read inside its tables
        return
    token = unpack_id(best)
    if SAMPLED and greedy == 0:
        times = load_tiles(tile_times, line, num_tiles, NEVER)
        least = tl.min(times, axis=0)
        first = tl.min(tl.where(times == least, tl.arange(0, MAX_TILES), MAX_ID), axis=0) * TILE
        ids = first + tl.arange(0, TILE)
        times = _times(lines, line, row_params, position, is_edited, best, filters, ids, vocab, EDITED)
        token = tl.min(tl.where(times == least, ids, MAX_ID), axis=0)
    tl.store(tokens + line, token)
    if advances != 0:
        tl.store(last + row, token)
        tl.store(row_params + NUM_TOKENS, num_tokens + 1)
        if marks is not None and (flags & PENALIZED) != 0:
            mark = marks + row * vocab + token
            tl.store(mark, (tl.load(mark) | SEEN) + 1)
