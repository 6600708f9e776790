# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The weights of all tiles, and the sampled token: where the running total, in the order of ids, passes a random
number."""

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


def sum_weights(job: Job) -> None:
    """job.tile_maxima -> job.sums, for lines without top_k and top_p."""
    _sum_weights[(job.tiles, job.lines)](job.line_args, job.sums, job.vocab, **job.options)


def pick(job: Job, tokens: Tensor, last: Tensor, *, sampled: bool) -> None:
    """Write the sampled tokens [lines] and last [rows], both int32, and advance the states of the rows."""
    _pick[(job.lines,)](
        job.line_args,
        job.marks,
        job.edits.allowed_maxima if job.edits else None,
        job.sums,
        job.filters,
        tokens,
        last,
        job.vocab,
        job.tiles,
        SAMPLED=sampled,
        **job.options,
    )


@triton.jit
def passes_min_p(weight, row_params):
    """A weight of 0 passes, and is never sampled."""
    return weight >= tl.load(row_params + MIN_WEIGHT)


@triton.jit
def _sum_weights(
    lines,  # LineArgs
    sums,  # [lines, tiles]
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
    if (tl.load(row_params + FLAGS) & GREEDY) != 0:
        return
    best = line_max(lines.tile_maxima, line, num_tiles)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_line(lines, needs_edits(row_params), line, ids, vocab, EDITED)
    weight = softmax_weight(x, finite_max(best), tl.load(row_params + INVERSE_TEMPERATURE).to(tl.float64, bitcast=True))
    weight = tl.where(passes_min_p(weight, row_params), weight, 0)
    tl.store(sums + line * num_tiles + tile, tl.sum(weight, axis=0))


@triton.jit
def _pick(
    lines,  # LineArgs
    marks,
    allowed_maxima,
    sums,  # [lines, tiles]
    filters,  # Filters, or None
    tokens,  # [lines]
    last,  # [rows]
    vocab,
    num_tiles,
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
    flags, position = tl.load(row_params + FLAGS), tl.load(row_params + NUM_TOKENS)
    is_edited = needs_edits(row_params)  # before the state advances: `line_max` has a barrier between
    greedy = (flags & GREEDY) != 0
    best = line_max(lines.tile_maxima, line, num_tiles)
    if EDITED and (unpack_key(best) == NEG_INF_KEY) & is_edited:
        best = line_max(allowed_maxima, line, num_tiles)  # everything is masked: the best allowed token
        greedy = greedy | True
    if unpack_key(best) == NEG_INF_KEY:
        tl.store(tokens + line, BROKEN)
        tl.store(last + row, 0)  # a next step of this row is discarded, and must read inside its tables
        return
    token = unpack_id(best)
    if SAMPLED and greedy == 0:
        tile_sums = load_tiles(sums, line, num_tiles, 0)
        below = uniform_below(
            tl.load(row_params + SEED), position, tl.load(row_params + SAMPLE), tl.sum(tile_sums, axis=0)
        )
        passed = tl.cumsum(tile_sums, axis=0) <= below
        below -= tl.sum(tl.where(passed, tile_sums, 0), axis=0)
        first = tl.sum(passed.to(tl.int32), axis=0) * TILE
        ids = first + tl.arange(0, TILE)
        x = load_line(lines, is_edited, line, ids, vocab, EDITED)
        weight = softmax_weight(
            x, finite_max(best), tl.load(row_params + INVERSE_TEMPERATURE).to(tl.float64, bitcast=True)
        )
        eligible = passes_min_p(weight, row_params)
        if filters is not None:
            key, last_key, last_id = (
                ordered_key(x),
                tl.load(filters.cutoffs + line * 2),
                tl.load(filters.cutoffs + line * 2 + 1),
            )
            eligible = eligible & ((key > last_key) | ((key == last_key) & (ids <= last_id)))
        running = tl.cumsum(tl.where(eligible, weight, 0), axis=0)
        token = first + tl.sum((running <= below).to(tl.int32), axis=0)
    tl.store(tokens + line, token)
    tl.store(last + row, token)
    tl.store(row_params + NUM_TOKENS, position + 1)
    if marks is not None and (flags & PENALIZED) != 0:
        mark = marks + row * vocab + token
        tl.store(mark, (tl.load(mark) | SEEN) + 1)
