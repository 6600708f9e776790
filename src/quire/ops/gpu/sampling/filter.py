# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""top_k and top_p without sorting: the distances from the greatest logit between which a line's cutoff is.

Tokens nearer than `near` pass, tokens as far as `far` do not, and the cutoff is among the *open* tokens between.

1. `_count` makes a histogram of the open tokens in 128 buckets of equal width. `_narrow` finds the bucket of the
cutoff:
   for top_k by the counts; for top_p a bucket weighs at least its count times its least weight, and at most its count
   times its greatest, and the same bounds from the far end are tight where little weight lies beyond the cutoff.
2. Where the open tokens are still too many to list, both run again: now 128 buckets in one or a few of the 128.
3. `_collect` lists the open tokens, a few hundred of them, and sums the weights that pass. cutoff.py does the rest.

Bounds need not be exact, only safe: a token that may or may not pass stays open."""

import triton
import triton.language as tl

from quire.ops.gpu.sampling.job import (
    FIELDS,
    FLAGS,
    GREEDY,
    INVERSE_TEMPERATURE,
    NUM_BUCKETS,
    TOP_K,
    TOP_P,
    Job,
    load_line,
    needs_edits,
)
from quire.ops.gpu.sampling.softmax_weights import (
    MAX_WEIGHT,
    NEG_INF_KEY,
    finite_max,
    line_max,
    load_tiles,
    softmax_weight,
    unpack_key,
)

# Columns of `progress`, int32.
IS_NARROW = tl.constexpr(0)  # the open tokens fit into their list: no second histogram
NUM_PASSED = tl.constexpr(1)  # tokens nearer than `near`
NUM_OPEN = tl.constexpr(2)  # open tokens, listed up to the capacity of the list
PROGRESS = tl.constexpr(4)

MAX_DISTANCE = tl.constexpr(32.0001)  # times the temperature: a token this far away weighs 0
DISTANCE_ERROR = tl.constexpr(1e-6)  # relative: distances and edges are rounded to fp32
MASS_ERROR = tl.constexpr(1e-9)  # relative to the total: bounds are summed in fp64


def bracket_cutoffs(job: Job) -> None:
    """job.tile_maxima -> job.filters, all but the cutoffs."""
    filters = job.filters
    assert filters is not None
    capacity = filters.open_ids.shape[1]
    lines = job.line_args
    every_tile, every_line = (job.tiles, job.lines), (job.lines,)
    for first in (True, False):
        _count[every_tile](lines, filters, job.vocab, FIRST=first, **job.options)
        _narrow[every_line](lines, filters, job.tiles, CAPACITY=capacity, FIRST=first, num_warps=1)
    _collect[every_tile](lines, filters, job.vocab, CAPACITY=capacity, **job.options)


@triton.jit
def load_double(row_params, field):
    return tl.load(row_params + field).to(tl.float64, bitcast=True)


@triton.jit
def has_cutoff(row_params):
    """Whether the row samples with top_k or top_p."""
    greedy = (tl.load(row_params + FLAGS) & GREEDY) != 0
    return (greedy == 0) & ((tl.load(row_params + TOP_K) > 0) | (load_double(row_params, TOP_P) < 1.0))


@triton.jit
def share_of(share, total):
    """ceil(share * total) in int64, share in (0, 1)."""
    return tl.minimum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def _interval(filters, line, inverse_temperature, FIRST: tl.constexpr):
    """(near, far) of the open tokens, fp32. At first, all tokens that have a weight."""
    if FIRST:
        near = tl.zeros((), tl.float32)
        far = (1.0 / inverse_temperature * MAX_DISTANCE).to(tl.float32)
    else:
        near, far = tl.load(filters.intervals + line * 2), tl.load(filters.intervals + line * 2 + 1)
    return near, far


@triton.jit
def _count(
    lines,  # LineArgs
    filters,  # Filters; its buckets are zeros
    vocab,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, line, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if FIRST:
        line = tl.num_programs(1) - 1 - line  # backwards: the last lines are still in the cache
    row = tl.load(lines.rows + line).to(tl.int64)
    if row < 0:
        return
    row_params = lines.params + row * FIELDS
    if has_cutoff(row_params) == 0:
        return
    if (FIRST == 0) and tl.load(filters.progress + line * PROGRESS + IS_NARROW) != 0:
        return
    inverse_temperature = load_double(row_params, INVERSE_TEMPERATURE)
    near, far = _interval(filters, line, inverse_temperature, FIRST)
    max_logit = finite_max(line_max(lines.tile_maxima, line, num_tiles))
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_line(lines, needs_edits(row_params), line, ids, vocab, EDITED)
    distance = tl.maximum(max_logit - x, 0.0)
    is_open = (distance >= near) & (distance < far)
    bucket = (tl.where(is_open, distance, near) - near) * (1.0 / (far - near) * NUM_BUCKETS)
    histogram = tl.histogram(tl.minimum(bucket.to(tl.int32), NUM_BUCKETS - 1), NUM_BUCKETS, mask=is_open)
    tl.atomic_add(
        filters.buckets + line * NUM_BUCKETS + tl.arange(0, NUM_BUCKETS), histogram, mask=histogram > 0, sem="relaxed"
    )
    if FIRST:
        if tl.load(row_params + TOP_K) == 0:  # else the total is the weight of the k tokens
            total = tl.sum(softmax_weight(x, max_logit, inverse_temperature), axis=0)
            tl.store(filters.totals + line * num_tiles + tile, total)
    else:
        passed = (distance < near).to(tl.int32)
        num_passed = tl.sum(passed, axis=0)
        if num_passed > 0:
            tl.atomic_add(filters.progress + line * PROGRESS + NUM_PASSED, num_passed, sem="relaxed")
            mass = tl.sum(softmax_weight(x, max_logit, inverse_temperature) * passed, axis=0)
            tl.atomic_add(filters.kept_mass + line, mass, sem="relaxed")


@triton.jit
def _edge(bucket, near, far):
    """The distance at which a bucket begins, fp64."""
    return near.to(tl.float64) + bucket.to(tl.float64) * ((far.to(tl.float64) - near) / NUM_BUCKETS)


@triton.jit
def _buckets_of_mass(count, need, total, kept, near, far, inverse_temperature, FIRST: tl.constexpr):
    """The first and the last bucket in which the running weight may reach `need`."""
    bucket = tl.arange(0, NUM_BUCKETS)
    distance_error = far * DISTANCE_ERROR
    nearest = tl.maximum(_edge(bucket, near, far) - distance_error, 0.0) * inverse_temperature
    farthest = (_edge(bucket + 1, near, far) + distance_error) * inverse_temperature
    min_mass = tl.maximum(tl.exp(-farthest) * MAX_WEIGHT * (1.0 - DISTANCE_ERROR) - 1.0, 0.0) * count
    max_mass = (tl.exp(-nearest) * MAX_WEIGHT * (1.0 + DISTANCE_ERROR) + 1.0) * count
    at_least, at_most = kept + tl.cumsum(min_mass, axis=0), kept + tl.cumsum(max_mass, axis=0)
    if FIRST:  # nothing beyond the buckets has a weight
        at_least, at_most = (
            tl.maximum(at_least, total - (tl.sum(max_mass, axis=0) - at_most)),
            tl.minimum(at_most, total - (tl.sum(min_mass, axis=0) - at_least)),
        )
    mass_error = total * MASS_ERROR
    first = tl.sum((at_most + mass_error < need).to(tl.int32), axis=0)
    last = tl.sum((at_least - mass_error < need).to(tl.int32), axis=0)
    return first, last


@triton.jit
def _narrow(lines, filters, num_tiles, CAPACITY: tl.constexpr, FIRST: tl.constexpr):
    line = tl.program_id(0)
    row = tl.load(lines.rows + line).to(tl.int64)
    if row < 0:
        return
    row_params = lines.params + row * FIELDS
    line_progress = filters.progress + line * PROGRESS
    if (FIRST == 0) and tl.load(line_progress + IS_NARROW) != 0:
        return
    tl.store(line_progress + NUM_OPEN, 0)
    if has_cutoff(row_params) == 0:
        tl.store(line_progress + IS_NARROW, 1)
        tl.store(line_progress + NUM_PASSED, 0)
        tl.store(filters.kept_mass + line, 0)
        tl.store(filters.intervals + line * 2, float("inf"))
        tl.store(filters.intervals + line * 2 + 1, float("inf"))
        return
    bucket = tl.arange(0, NUM_BUCKETS)
    count = tl.load(filters.buckets + line * NUM_BUCKETS + bucket)
    tl.store(filters.buckets + line * NUM_BUCKETS + bucket, tl.zeros_like(count))  # for the next step
    inverse_temperature = load_double(row_params, INVERSE_TEMPERATURE)
    near, far = _interval(filters, line, inverse_temperature, FIRST)
    top_k, top_p = tl.load(row_params + TOP_K), load_double(row_params, TOP_P)
    num_passed, kept = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    if FIRST == 0:
        num_passed, kept = tl.load(line_progress + NUM_PASSED), tl.load(filters.kept_mass + line)
    if top_k > 0:
        first = tl.sum((tl.cumsum(count, axis=0) + num_passed < top_k).to(tl.int32), axis=0)
        last = first
    else:
        total = tl.sum(load_tiles(filters.totals, line, num_tiles, 0), axis=0)
        need = share_of(top_p, total).to(tl.float64)
        first, last = _buckets_of_mass(
            count, need, total.to(tl.float64), kept.to(tl.float64), near, far, inverse_temperature, FIRST
        )
    first, last = tl.minimum(first, NUM_BUCKETS - 1), tl.minimum(last, NUM_BUCKETS - 1)
    distance_error = far * DISTANCE_ERROR
    next_far = _edge(last + 1, near, far) + distance_error
    next_near = tl.maximum(_edge(first, near, far) - distance_error, 0.0)
    from_first = num_passed + tl.sum(tl.where(bucket <= last, count, 0), axis=0)
    is_narrow = tl.sum(tl.where((bucket >= first) & (bucket <= last), count, 0), axis=0) <= CAPACITY
    if (from_first <= CAPACITY) | ((top_k > 0) & (top_p < 1.0)):
        next_near = next_near * 0.0  # with every token that may pass in the list, top_p can follow top_k
        is_narrow = from_first <= CAPACITY
    tl.store(line_progress + IS_NARROW, is_narrow.to(tl.int32))
    tl.store(line_progress + NUM_PASSED, 0)
    tl.store(filters.kept_mass + line, 0)
    tl.store(filters.intervals + line * 2, next_near.to(tl.float32))
    tl.store(filters.intervals + line * 2 + 1, next_far.to(tl.float32))


@triton.jit
def _collect(
    lines,  # LineArgs
    filters,  # Filters; open_ids are listed in no order
    vocab,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, line, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(lines.rows + line).to(tl.int64)
    if row < 0:
        return
    row_params = lines.params + row * FIELDS
    best = line_max(lines.tile_maxima, line, num_tiles)
    if ((tl.load(row_params + FLAGS) & GREEDY) != 0) | (unpack_key(best) == NEG_INF_KEY):
        return
    near, far = tl.load(filters.intervals + line * 2), tl.load(filters.intervals + line * 2 + 1)
    line_progress = filters.progress + line * PROGRESS
    max_logit = finite_max(best)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_line(lines, needs_edits(row_params), line, ids, vocab, EDITED)
    distance = tl.maximum(max_logit - x, 0.0)
    passed = (distance < near).to(tl.int32)
    num_passed = tl.sum(passed, axis=0)
    if num_passed > 0:
        weight = softmax_weight(x, max_logit, load_double(row_params, INVERSE_TEMPERATURE)) * passed
        tl.atomic_add(line_progress + NUM_PASSED, num_passed, sem="relaxed")
        tl.atomic_add(filters.kept_mass + line, tl.sum(weight, axis=0), sem="relaxed")
    is_open = ((distance >= near) & (distance < far)).to(tl.int32)
    num_open = tl.sum(is_open, axis=0)
    if num_open > 0:
        start = tl.atomic_add(line_progress + NUM_OPEN, num_open, sem="relaxed")
        slot = start + tl.cumsum(is_open, axis=0) - is_open
        tl.store(filters.open_ids + line * CAPACITY + slot, ids, mask=(is_open > 0) & (slot < CAPACITY))
