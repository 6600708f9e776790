# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The exact cutoff of top_k and top_p: the last token that passes, in the order of (logit, id), by bisection.

`_cutoff_among_open` holds the open tokens of a line in registers. `_cutoff_of_line` reads the whole line again and
again; it is for lines with thousands of equal logits at the cutoff, and for a top_k of thousands together with
top_p."""

import triton
import triton.language as tl

from quire.ops.gpu.sampling.filter import (
    DISTANCE_ERROR,
    NUM_OPEN,
    NUM_PASSED,
    PROGRESS,
    has_cutoff,
    load_double,
    share_of,
)
from quire.ops.gpu.sampling.job import (
    FIELDS,
    FLAGS,
    GREEDY,
    INVERSE_TEMPERATURE,
    TOP_K,
    TOP_P,
    Job,
    load_line,
    needs_edits,
)
from quire.ops.gpu.sampling.softmax_weights import (
    MAX_ID,
    NEG_INF_KEY,
    finite_max,
    line_max,
    load_tiles,
    ordered_key,
    softmax_weight,
    unpack_key,
)

INT32_MIN = tl.constexpr(-(1 << 31))
INT32_MAX = tl.constexpr((1 << 31) - 1)


def find_cutoffs(job: Job) -> None:
    """The open tokens of `bracket_cutoffs` -> job.filters.cutoffs."""
    filters = job.filters
    assert filters is not None
    arguments = (job.line_args, filters, job.vocab, job.tiles)
    options = {**job.options, "CAPACITY": filters.open_ids.shape[1], "num_warps": 8}
    _cutoff_among_open[(job.lines,)](*arguments, **options)
    _cutoff_of_line[(job.lines,)](*arguments, **options)


@triton.jit
def _samples(lines, line, num_tiles):
    """Whether the line's row samples, and has a logit above -inf."""
    row = tl.load(lines.rows + line).to(tl.int64)
    samples = row >= 0
    if samples:
        greedy = (tl.load(lines.params + row * FIELDS + FLAGS) & GREEDY) != 0
        samples = (greedy == 0) & (unpack_key(line_max(lines.tile_maxima, line, num_tiles)) != NEG_INF_KEY)
    return samples


# -- among the open tokens --------------------------------------------------------------------------------------------


@triton.jit
def _find_key(key, measure, need):
    """The greatest key such that the tokens above it measure less than `need`, and with it `need` or more.

    key [n] int32, measure [n] int64 (0 where there is no token); 0 < need <= the sum of measures"""
    low = tl.min(tl.where(measure > 0, key, INT32_MAX), axis=0).to(tl.int64)
    high = tl.max(tl.where(measure > 0, key, INT32_MIN), axis=0).to(tl.int64)
    while low < high:  # both are keys of tokens: a few rounds, however far the keys are apart
        middle = (low + high) >> 1
        above = (key > middle.to(tl.int32)) & (measure > 0)
        if tl.sum(tl.where(above, measure, 0), axis=0) < need:
            below = (measure > 0) & (above == 0)
            high = tl.max(tl.where(below, key, INT32_MIN), axis=0).to(tl.int64)
        else:
            low = tl.min(tl.where(above, key, INT32_MAX), axis=0).to(tl.int64)
    return low.to(tl.int32)


@triton.jit
def _last_of_equals(ids, equal, wanted):
    """The id of the wanted-th of the equal tokens, in the order of ids. ids [n] int32, equal [n]"""
    last = tl.max(tl.where(equal, ids, 0), axis=0)
    if wanted < tl.sum(equal.to(tl.int32), axis=0):
        last = -_find_key(-ids, equal.to(tl.int64), wanted)
    return last


@triton.jit
def _is_before(key, ids, last_key, last_id):
    """Whether a token is not after the last one, in the order of (logit, id)."""
    return (key > last_key) | ((key == last_key) & (ids <= last_id))


@triton.jit
def _cutoff_among_open(
    lines,  # LineArgs
    filters,  # Filters
    vocab,
    num_tiles,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    line = tl.program_id(0)
    if _samples(lines, line, num_tiles) == 0:
        return
    row = tl.load(lines.rows + line).to(tl.int64)
    row_params = lines.params + row * FIELDS
    if has_cutoff(row_params) == 0:
        tl.store(filters.cutoffs + line * 2, NEG_INF_KEY)
        tl.store(filters.cutoffs + line * 2 + 1, MAX_ID)
        return
    line_progress = filters.progress + line * PROGRESS
    num_open = tl.load(line_progress + NUM_OPEN)
    if num_open > CAPACITY:
        return
    slot = tl.arange(0, CAPACITY)
    here = slot < num_open
    ids = tl.load(filters.open_ids + line * CAPACITY + slot, mask=here, other=vocab)
    max_logit = finite_max(line_max(lines.tile_maxima, line, num_tiles))
    x = load_line(lines, needs_edits(row_params), line, ids, vocab, EDITED)
    key, weight = ordered_key(x), softmax_weight(x, max_logit, load_double(row_params, INVERSE_TEMPERATURE))
    passed = here
    cutoff, last_id = tl.full((), NEG_INF_KEY, tl.int32), tl.full((), MAX_ID, tl.int32)

    top_k = tl.load(row_params + TOP_K)
    need = top_k - tl.load(line_progress + NUM_PASSED)
    if (top_k > 0) & (need <= num_open):  # else every token that has a weight passes
        cutoff = _find_key(key, here.to(tl.int64), need)
        num_above = tl.sum((here & (key > cutoff)).to(tl.int32), axis=0)
        last_id = _last_of_equals(ids, here & (key == cutoff), need - num_above)
        passed = here & _is_before(key, ids, cutoff, last_id)
    top_p = load_double(row_params, TOP_P)
    if top_p < 1.0:
        mass = tl.where(passed, weight, 0)
        total = tl.where(
            top_k > 0, tl.sum(mass, axis=0), tl.sum(load_tiles(filters.totals, line, num_tiles, 0), axis=0)
        )
        need = share_of(top_p, total) - tl.load(filters.kept_mass + line)
        cutoff = _find_key(key, mass, need)
        need -= tl.sum(tl.where(key > cutoff, mass, 0), axis=0)
        each = tl.max(tl.where(key == cutoff, mass, 0), axis=0)
        last_id = _last_of_equals(ids, passed & (key == cutoff), (need + each - 1) // each)
        passed = passed & _is_before(key, ids, cutoff, last_id)
    tl.store(filters.cutoffs + line * 2, cutoff)
    tl.store(filters.cutoffs + line * 2 + 1, last_id)


# -- over the whole line ----------------------------------------------------------------------------------------------


@triton.jit
def _measure(
    lines,  # LineArgs
    state,  # whether the line is edited, the line, its greatest logit, the inverse temperature
    last_key,
    last_id,
    cutoff_key,
    cutoff_id,
    vocab,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    """The number, or the weight, of the tokens that are both up to the last one and up to the cutoff."""
    is_edited, line, max_logit, inverse_temperature = state
    total = tl.zeros((), tl.int64)
    start = 0
    while start < vocab:
        ids = start + tl.arange(0, TILE)
        x = load_line(lines, is_edited, line, ids, vocab, EDITED)
        key = ordered_key(x).to(tl.int64)
        counted = (ids < vocab) & _is_before(key, ids, last_key, last_id) & _is_before(key, ids, cutoff_key, cutoff_id)
        if BY_WEIGHT:
            total += tl.sum(tl.where(counted, softmax_weight(x, max_logit, inverse_temperature), 0), axis=0)
        else:
            total += tl.sum(counted.to(tl.int64), axis=0)
        start += TILE
    return total


@triton.jit
def _find_cutoff(
    lines,  # LineArgs
    state,  # see `_measure`
    need,
    cutoff_key,
    cutoff_id,
    low,
    high,
    vocab,
    BY_WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    """The token, in the order of (logit, id), at which the measure of the tokens up to the cutoff reaches `need`. Its
    key is in low .. high; if all of them measure less, it is the last one."""
    while low < high:
        middle = (low + high) >> 1
        if _measure(lines, state, middle, -1, cutoff_key, cutoff_id, vocab, BY_WEIGHT, TILE, EDITED) < need:
            high = middle
        else:
            low = middle + 1
    first, last = tl.full((), 0, tl.int64), vocab - tl.full((), 1, tl.int64)
    while first < last:
        middle = (first + last) >> 1
        if _measure(lines, state, low, middle, cutoff_key, cutoff_id, vocab, BY_WEIGHT, TILE, EDITED) < need:
            first = middle + 1
        else:
            last = middle
    return low, first


@triton.jit
def _cutoff_of_line(
    lines,  # LineArgs
    filters,  # Filters
    vocab,
    num_tiles,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    line = tl.program_id(0)
    if _samples(lines, line, num_tiles) == 0:
        return
    if tl.load(filters.progress + line * PROGRESS + NUM_OPEN) <= CAPACITY:
        return
    row = tl.load(lines.rows + line).to(tl.int64)
    row_params = lines.params + row * FIELDS
    best = line_max(lines.tile_maxima, line, num_tiles)
    max_logit = finite_max(best)
    near, far = tl.load(filters.intervals + line * 2), tl.load(filters.intervals + line * 2 + 1)
    distance_error = far * DISTANCE_ERROR
    low = ordered_key(max_logit - far - distance_error).to(tl.int64)
    high = tl.where(near > 0.0, ordered_key(max_logit - near + distance_error), unpack_key(best)).to(tl.int64)
    inverse_temperature = load_double(row_params, INVERSE_TEMPERATURE)
    is_edited = needs_edits(row_params)
    state = (is_edited, line, max_logit, inverse_temperature)
    key, id = tl.full((), NEG_INF_KEY, tl.int64), tl.full((), MAX_ID, tl.int64)
    top_k = tl.load(row_params + TOP_K)
    if top_k > 0:
        key, id = _find_cutoff(lines, state, top_k, key, id, low, high, vocab, False, TILE, EDITED)
    top_p = load_double(row_params, TOP_P)
    if top_p < 1.0:
        total = _measure(lines, state, key, id, key, id, vocab, True, TILE, EDITED)
        key, id = _find_cutoff(lines, state, share_of(top_p, total), key, id, low, high, vocab, True, TILE, EDITED)
    tl.store(filters.cutoffs + line * 2, key.to(tl.int32))
    tl.store(filters.cutoffs + line * 2 + 1, id.to(tl.int32))
