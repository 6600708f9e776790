# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""top_k and top_p without sorting: between which distances from the greatest logit a line's order is cut off.

What is nearer than `near` passes, what is as far as `far` does not, and the cut is among the *open* tokens between.

1. `_count` sorts the open tokens into 128 buckets of equal width. `_narrow` sees in which of them the cut lies: for
   top_k the counts tell; for top_p a bucket weighs at least its count times its least weight, and at most its count
   times its greatest, and the same bounds from the far end are tight where little weight lies beyond the cut.
2. Where the open tokens are still too many to list, the same again: now 128 buckets in one or a few of the 128.
3. `_collect` lists the open tokens, a few hundred of them, and sums what passes. sample_cut.py does the rest.

Bounds need not be exact, only safe: what is in doubt stays open, and what passes is counted and weighed anew."""

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
from quire.ops.gpu.sampling.pick import may_be_drawn
from quire.ops.gpu.sampling.softmax_weights import (
    NOTHING,
    ONE,
    finite_peak,
    greatest_of_tiles,
    load_tiles,
    packed_key,
    weigh,
)

# Columns of `progress`, int32.
IS_NARROW = tl.constexpr(0)  # the open tokens fit in their list: no need to count again
NUM_PASSED = tl.constexpr(1)  # tokens nearer than `near`
NUM_OPEN = tl.constexpr(2)  # tokens between; those beyond the capacity of the list are not in it
PROGRESS = tl.constexpr(4)

WEIGHTLESS = tl.constexpr(32.0001)  # in units of the temperature: this far away a token weighs 0
DISTANCE_ERROR = tl.constexpr(1e-6)  # relative: distances and edges are rounded to fp32
MASS_ERROR = tl.constexpr(1e-9)  # relative to the total: bounds are summed in fp64


def bracket_cutoffs(job: Job) -> None:
    """job.peaks -> job.filters, all but the cuts, and job.sums of what surely passes."""
    filters = job.filters
    assert filters is not None
    capacity = filters.open_ids.shape[1]
    found = (filters.intervals, filters.progress, filters.kept_mass)
    counted = (filters.counts, filters.totals)
    every_tile, every_line = (job.tiles, job.lines), (job.lines,)
    for first in (True, False):
        _count[every_tile](*job.source, *found, *counted, job.vocab, FIRST=first, **job.options)
        _narrow[every_line](
            job.rows,
            job.params,
            *found,
            *counted,
            job.tiles,
            CAPACITY=capacity,
            FIRST=first,
            num_warps=1,
        )
    _collect[every_tile](*job.source, *found, filters.open_ids, job.sums, job.vocab, CAPACITY=capacity, **job.options)


@triton.jit
def load_double(params_of_row, field):
    return tl.load(params_of_row + field).to(tl.float64, bitcast=True)


@triton.jit
def is_limited(params_of_row):
    """Whether top_k or top_p cut the order of what this row samples from."""
    greedy = (tl.load(params_of_row + FLAGS) & GREEDY) != 0
    return (greedy == 0) & ((tl.load(params_of_row + TOP_K) > 0) | (load_double(params_of_row, TOP_P) < 1.0))


@triton.jit
def mass_of(share, total):
    """Of a total, the part `share` in (0, 1), rounded up: int64."""
    return tl.minimum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def _interval(intervals, line, inverse_temperature, FIRST: tl.constexpr):
    """Where the open tokens are: (near, far), fp32. At first, wherever a token weighs anything."""
    if FIRST:
        near = tl.zeros((), tl.float32)
        far = (1.0 / inverse_temperature * WEIGHTLESS).to(tl.float32)
    else:
        near, far = tl.load(intervals + line * 2), tl.load(intervals + line * 2 + 1)
    return near, far


@triton.jit
def _count(
    logits,
    stride,
    rows,
    fields,
    edited,
    peaks,
    intervals,  # [lines, 2]
    progress,  # [lines, PROGRESS]
    kept_mass,  # [lines]
    counts,  # [lines, NUM_BUCKETS], zeros
    totals,  # [lines, tiles]
    vocab,
    FIRST: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, line, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    if FIRST:
        line = tl.num_programs(1) - 1 - line  # backwards: the last lines are still in the cache
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        return
    at = fields + row * FIELDS
    if is_limited(at) == 0:
        return
    if (FIRST == 0) and tl.load(progress + line * PROGRESS + IS_NARROW) != 0:
        return
    inverse_temperature = load_double(at, INVERSE_TEMPERATURE)
    near, far = _interval(intervals, line, inverse_temperature, FIRST)
    peak = finite_peak(greatest_of_tiles(peaks, line, num_tiles))
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_line(logits, stride, edited, needs_edits(at), line, ids, vocab, EDITED)
    distance = tl.maximum(peak - x, 0.0)
    is_open = (distance >= near) & (distance < far)
    place = (tl.where(is_open, distance, near) - near) * (1.0 / (far - near) * NUM_BUCKETS)
    found = tl.histogram(tl.minimum(place.to(tl.int32), NUM_BUCKETS - 1), NUM_BUCKETS, mask=is_open)
    tl.atomic_add(counts + line * NUM_BUCKETS + tl.arange(0, NUM_BUCKETS), found, mask=found > 0, sem="relaxed")
    if FIRST:
        if tl.load(at + TOP_K) == 0:  # else the total is that of the k tokens
            total = tl.sum(weigh(x, peak, inverse_temperature), axis=0)
            tl.store(totals + line * num_tiles + tile, total)
    else:
        passed = (distance < near).to(tl.int32)
        num_passed = tl.sum(passed, axis=0)
        if num_passed > 0:
            tl.atomic_add(progress + line * PROGRESS + NUM_PASSED, num_passed, sem="relaxed")
            mass = tl.sum(weigh(x, peak, inverse_temperature) * passed, axis=0)
            tl.atomic_add(kept_mass + line, mass, sem="relaxed")


@triton.jit
def _edge(bucket, near, far):
    """The distance at which a bucket begins: fp64."""
    return near.to(tl.float64) + bucket.to(tl.float64) * ((far.to(tl.float64) - near) / NUM_BUCKETS)


@triton.jit
def _buckets_of_mass(count, need, total, kept, near, far, inverse_temperature, FIRST: tl.constexpr):
    """The first and the last bucket in which the running weight may reach `need`."""
    bucket = tl.arange(0, NUM_BUCKETS)
    distance_error = far * DISTANCE_ERROR
    nearest = tl.maximum(_edge(bucket, near, far) - distance_error, 0.0) * inverse_temperature
    farthest = (_edge(bucket + 1, near, far) + distance_error) * inverse_temperature
    least = tl.maximum(tl.exp(-farthest) * ONE * (1.0 - DISTANCE_ERROR) - 1.0, 0.0) * count
    most = (tl.exp(-nearest) * ONE * (1.0 + DISTANCE_ERROR) + 1.0) * count
    at_least, at_most = kept + tl.cumsum(least, axis=0), kept + tl.cumsum(most, axis=0)
    if FIRST:  # and nothing that weighs lies beyond the buckets
        at_least, at_most = (
            tl.maximum(at_least, total - (tl.sum(most, axis=0) - at_most)),
            tl.minimum(at_most, total - (tl.sum(least, axis=0) - at_least)),
        )
    mass_error = total * MASS_ERROR
    first = tl.sum((at_most + mass_error < need).to(tl.int32), axis=0)
    last = tl.sum((at_least - mass_error < need).to(tl.int32), axis=0)
    return first, last


@triton.jit
def _narrow(
    rows,
    fields,
    intervals,  # [lines, 2]
    progress,  # [lines, PROGRESS]
    kept_mass,  # [lines]
    counts,  # [lines, NUM_BUCKETS]
    totals,  # [lines, tiles]
    num_tiles,
    CAPACITY: tl.constexpr,
    FIRST: tl.constexpr,
):
    line = tl.program_id(0)
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        return
    at = fields + row * FIELDS
    mine = progress + line * PROGRESS
    if (FIRST == 0) and tl.load(mine + IS_NARROW) != 0:
        return
    tl.store(mine + NUM_OPEN, 0)
    if is_limited(at) == 0:
        tl.store(mine + IS_NARROW, 1)
        tl.store(mine + NUM_PASSED, 0)
        tl.store(kept_mass + line, 0)
        tl.store(intervals + line * 2, float("inf"))
        tl.store(intervals + line * 2 + 1, float("inf"))
        return
    bucket = tl.arange(0, NUM_BUCKETS)
    count = tl.load(counts + line * NUM_BUCKETS + bucket)
    tl.store(counts + line * NUM_BUCKETS + bucket, tl.zeros_like(count))  # as the next step expects them
    inverse_temperature = load_double(at, INVERSE_TEMPERATURE)
    near, far = _interval(intervals, line, inverse_temperature, FIRST)
    top_k, top_p = tl.load(at + TOP_K), load_double(at, TOP_P)
    num_passed, kept = tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    if FIRST == 0:
        num_passed, kept = tl.load(mine + NUM_PASSED), tl.load(kept_mass + line)
    if top_k > 0:
        first = tl.sum((tl.cumsum(count, axis=0) + num_passed < top_k).to(tl.int32), axis=0)
        last = first
    else:
        total = tl.sum(load_tiles(totals, line, num_tiles, 0), axis=0)
        need = mass_of(top_p, total).to(tl.float64)
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
        next_near = next_near * 0.0  # with all that may pass listed, top_p can follow top_k
        is_narrow = from_first <= CAPACITY
    tl.store(mine + IS_NARROW, is_narrow.to(tl.int32))
    tl.store(mine + NUM_PASSED, 0)
    tl.store(kept_mass + line, 0)
    tl.store(intervals + line * 2, next_near.to(tl.float32))
    tl.store(intervals + line * 2 + 1, next_far.to(tl.float32))


@triton.jit
def _collect(
    logits,
    stride,
    rows,
    fields,
    edited,
    peaks,
    intervals,  # [lines, 2]
    progress,  # [lines, PROGRESS]
    kept_mass,  # [lines]
    open_ids,  # [lines, CAPACITY], in no order
    sums,  # [lines, tiles]
    vocab,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, line, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        return
    at = fields + row * FIELDS
    best = greatest_of_tiles(peaks, line, num_tiles)
    if ((tl.load(at + FLAGS) & GREEDY) != 0) | (packed_key(best) == NOTHING):
        return
    near, far = tl.load(intervals + line * 2), tl.load(intervals + line * 2 + 1)
    mine = progress + line * PROGRESS
    peak = finite_peak(best)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_line(logits, stride, edited, needs_edits(at), line, ids, vocab, EDITED)
    distance = tl.maximum(peak - x, 0.0)
    passed = (distance < near).to(tl.int32)
    num_passed = tl.sum(passed, axis=0)
    drawable = tl.zeros((), tl.int64)
    if num_passed > 0:
        weight = weigh(x, peak, load_double(at, INVERSE_TEMPERATURE)) * passed
        tl.atomic_add(mine + NUM_PASSED, num_passed, sem="relaxed")
        tl.atomic_add(kept_mass + line, tl.sum(weight, axis=0), sem="relaxed")
        drawable += tl.sum(tl.where(may_be_drawn(weight, at), weight, 0), axis=0)
    tl.store(sums + line * num_tiles + tile, drawable)
    is_open = ((distance >= near) & (distance < far)).to(tl.int32)
    num_open = tl.sum(is_open, axis=0)
    if num_open > 0:
        start = tl.atomic_add(mine + NUM_OPEN, num_open, sem="relaxed")
        place = start + tl.cumsum(is_open, axis=0) - is_open
        tl.store(open_ids + line * CAPACITY + place, ids, mask=(is_open > 0) & (place < CAPACITY))
