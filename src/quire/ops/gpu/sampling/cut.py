# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The exact end of what top_k and top_p leave: the last token in the order of (logit, id), by bisection.

`_cut_open` holds the open tokens of a line in registers. `_cut_line` walks over the whole line again and again; it is
for lines with thousands of equal logits at the cut, and for a top_k of thousands together with top_p."""

import triton
import triton.language as tl

from quire.ops.gpu.sampling.filter import (
    DISTANCE_ERROR,
    NUM_OPEN,
    NUM_PASSED,
    PROGRESS,
    is_limited,
    load_double,
    mass_of,
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
from quire.ops.gpu.sampling.pick import may_be_drawn
from quire.ops.gpu.sampling.softmax_weights import (
    LAST_ID,
    NOTHING,
    finite_peak,
    greatest_of_tiles,
    load_tiles,
    ordered,
    packed_key,
    weigh,
)

LOWEST = tl.constexpr(-(1 << 31))
HIGHEST = tl.constexpr((1 << 31) - 1)


def find_cutoffs(job: Job) -> None:
    """What `bracket_cutoffs` has left -> job.filters.cuts; job.sums gain the open tokens that pass."""
    filters = job.filters
    assert filters is not None
    arguments = (
        *job.source,
        filters.totals,
        filters.intervals,
        filters.progress,
        filters.kept_mass,
        filters.open_ids,
        job.sums,
        filters.cutoffs,
        job.vocab,
        job.tiles,
    )
    options = {**job.options, "CAPACITY": filters.open_ids.shape[1], "num_warps": 8}
    _cut_open[(job.lines,)](*arguments, **options)
    _cut_line[(job.lines,)](*arguments, **options)


@triton.jit
def _samples(rows, fields, peaks, line, num_tiles):
    """Whether the line's row samples, from something."""
    row = tl.load(rows + line).to(tl.int64)
    busy = row >= 0
    if busy:
        greedy = (tl.load(fields + row * FIELDS + FLAGS) & GREEDY) != 0
        busy = (greedy == 0) & (packed_key(greatest_of_tiles(peaks, line, num_tiles)) != NOTHING)
    return busy


# -- among the open tokens --------------------------------------------------------------------------------------------


@triton.jit
def _crossing(key, measure, need):
    """The greatest key such that what is above it measures less than `need`, and it and what is above does not.

    key [n] int32, measure [n] int64 (0 where there is no token); 0 < need <= the sum of measures"""
    low = tl.min(tl.where(measure > 0, key, HIGHEST), axis=0).to(tl.int64)
    high = tl.max(tl.where(measure > 0, key, LOWEST), axis=0).to(tl.int64)
    while low < high:  # both are keys of tokens: a handful of rounds, however far the keys are apart
        middle = (low + high) >> 1
        above = (key > middle.to(tl.int32)) & (measure > 0)
        if tl.sum(tl.where(above, measure, 0), axis=0) < need:
            below = (measure > 0) & (above == 0)
            high = tl.max(tl.where(below, key, LOWEST), axis=0).to(tl.int64)
        else:
            low = tl.min(tl.where(above, key, HIGHEST), axis=0).to(tl.int64)
    return low.to(tl.int32)


@triton.jit
def _last_of_equals(ids, equal, wanted):
    """The id of the wanted-th of the tokens that are equal, in the order of ids. ids [n] int32, equal [n]"""
    last = tl.max(tl.where(equal, ids, 0), axis=0)
    if wanted < tl.sum(equal.to(tl.int32), axis=0):
        last = -_crossing(-ids, equal.to(tl.int64), wanted)
    return last


@triton.jit
def _is_before(key, ids, last_key, last_id):
    """Whether a token is, in the order of (logit, id), no later than the last."""
    return (key > last_key) | ((key == last_key) & (ids <= last_id))


@triton.jit
def _cut_open(
    logits,
    stride,
    rows,
    fields,
    edited,
    peaks,
    totals,
    intervals,
    progress,
    kept_mass,
    open_ids,
    sums,
    cutoffs,  # [lines, 2]
    vocab,
    num_tiles,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    line = tl.program_id(0)
    if _samples(rows, fields, peaks, line, num_tiles) == 0:
        return
    row = tl.load(rows + line).to(tl.int64)
    at = fields + row * FIELDS
    if is_limited(at) == 0:
        tl.store(cutoffs + line * 2, NOTHING)
        tl.store(cutoffs + line * 2 + 1, LAST_ID)
        return
    mine = progress + line * PROGRESS
    num_open = tl.load(mine + NUM_OPEN)
    if num_open > CAPACITY:
        return
    place = tl.arange(0, CAPACITY)
    here = place < num_open
    ids = tl.load(open_ids + line * CAPACITY + place, mask=here, other=vocab)
    peak = finite_peak(greatest_of_tiles(peaks, line, num_tiles))
    x = load_line(logits, stride, edited, needs_edits(at), line, ids, vocab, EDITED)
    key, weight = ordered(x), weigh(x, peak, load_double(at, INVERSE_TEMPERATURE))
    passed = here
    cut, last_id = tl.full((), NOTHING, tl.int32), tl.full((), LAST_ID, tl.int32)

    top_k = tl.load(at + TOP_K)
    need = top_k - tl.load(mine + NUM_PASSED)
    if (top_k > 0) & (need <= num_open):  # else all that weighs anything passes
        cut = _crossing(key, here.to(tl.int64), need)
        num_above = tl.sum((here & (key > cut)).to(tl.int32), axis=0)
        last_id = _last_of_equals(ids, here & (key == cut), need - num_above)
        passed = here & _is_before(key, ids, cut, last_id)
    top_p = load_double(at, TOP_P)
    if top_p < 1.0:
        mass = tl.where(passed, weight, 0)
        total = tl.where(top_k > 0, tl.sum(mass, axis=0), tl.sum(load_tiles(totals, line, num_tiles, 0), axis=0))
        need = mass_of(top_p, total) - tl.load(kept_mass + line)
        cut = _crossing(key, mass, need)
        need -= tl.sum(tl.where(key > cut, mass, 0), axis=0)
        each = tl.max(tl.where(key == cut, mass, 0), axis=0)
        last_id = _last_of_equals(ids, passed & (key == cut), (need + each - 1) // each)
        passed = passed & _is_before(key, ids, cut, last_id)
    tl.store(cutoffs + line * 2, cut)
    tl.store(cutoffs + line * 2 + 1, last_id)
    drawn = passed & may_be_drawn(weight, at)
    tl.atomic_add(sums + line * num_tiles + ids // TILE, weight, mask=drawn, sem="relaxed")


# -- over the whole line ----------------------------------------------------------------------------------------------


@triton.jit
def _measure(
    source, last_key, last_id, cut_key, cut_id, vocab, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr, EDITED: tl.constexpr
):
    """The number, or the weight, of the tokens up to the last one, if that is also up to the cut."""
    logits, stride, edited, is_edited, line, peak, inverse_temperature = source
    total = tl.zeros((), tl.int64)
    start = 0
    while start < vocab:
        ids = start + tl.arange(0, TILE)
        x = load_line(logits, stride, edited, is_edited, line, ids, vocab, EDITED)
        key = ordered(x).to(tl.int64)
        counted = (ids < vocab) & _is_before(key, ids, last_key, last_id) & _is_before(key, ids, cut_key, cut_id)
        if BY_WEIGHT:
            total += tl.sum(tl.where(counted, weigh(x, peak, inverse_temperature), 0), axis=0)
        else:
            total += tl.sum(counted.to(tl.int64), axis=0)
        start += TILE
    return total


@triton.jit
def _cut_by(
    source, need, cut_key, cut_id, low, high, vocab, BY_WEIGHT: tl.constexpr, TILE: tl.constexpr, EDITED: tl.constexpr
):
    """The token, in the order of (logit, id), at which the measure of what is up to the cut reaches `need`. Its key is
    in low .. high; if all that is there is not enough, it is the last of them."""
    while low < high:
        middle = (low + high) >> 1
        if _measure(source, middle, -1, cut_key, cut_id, vocab, BY_WEIGHT, TILE, EDITED) < need:
            high = middle
        else:
            low = middle + 1
    first, last = tl.full((), 0, tl.int64), vocab - tl.full((), 1, tl.int64)
    while first < last:
        middle = (first + last) >> 1
        if _measure(source, low, middle, cut_key, cut_id, vocab, BY_WEIGHT, TILE, EDITED) < need:
            first = middle + 1
        else:
            last = middle
    return low, first


@triton.jit
def _cut_line(
    logits,
    stride,
    rows,
    fields,
    edited,
    peaks,
    totals,
    intervals,
    progress,
    kept_mass,
    open_ids,
    sums,
    cutoffs,  # [lines, 2]
    vocab,
    num_tiles,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    EDITED: tl.constexpr,
):
    line = tl.program_id(0)
    if _samples(rows, fields, peaks, line, num_tiles) == 0:
        return
    if tl.load(progress + line * PROGRESS + NUM_OPEN) <= CAPACITY:
        return
    row = tl.load(rows + line).to(tl.int64)
    at = fields + row * FIELDS
    best = greatest_of_tiles(peaks, line, num_tiles)
    peak = finite_peak(best)
    near, far = tl.load(intervals + line * 2), tl.load(intervals + line * 2 + 1)
    distance_error = far * DISTANCE_ERROR
    low = ordered(peak - far - distance_error).to(tl.int64)
    high = tl.where(near > 0.0, ordered(peak - near + distance_error), packed_key(best)).to(tl.int64)
    inverse_temperature = load_double(at, INVERSE_TEMPERATURE)
    is_edited = needs_edits(at)
    source = (logits, stride, edited, is_edited, line, peak, inverse_temperature)
    key, id = tl.full((), NOTHING, tl.int64), tl.full((), LAST_ID, tl.int64)
    top_k = tl.load(at + TOP_K)
    if top_k > 0:
        key, id = _cut_by(source, top_k, key, id, low, high, vocab, False, TILE, EDITED)
    top_p = load_double(at, TOP_P)
    if top_p < 1.0:
        total = _measure(source, key, id, key, id, vocab, True, TILE, EDITED)
        key, id = _cut_by(source, mass_of(top_p, total), key, id, low, high, vocab, True, TILE, EDITED)
    tl.store(cutoffs + line * 2, key.to(tl.int32))
    tl.store(cutoffs + line * 2 + 1, id.to(tl.int32))
    tile = 0
    while tile < num_tiles:
        ids = tile * TILE + tl.arange(0, TILE)
        x = load_line(logits, stride, edited, is_edited, line, ids, vocab, EDITED)
        weight = weigh(x, peak, inverse_temperature)
        drawn = may_be_drawn(weight, at) & _is_before(ordered(x).to(tl.int64), ids, key, id)
        tl.store(sums + line * num_tiles + tile, tl.sum(tl.where(drawn, weight, 0), axis=0))
        tile += 1
