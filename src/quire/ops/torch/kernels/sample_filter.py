# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""top_k and top_p without sorting: where a line's order, the most likely first, is cut off.

1. `count_buckets`: how many logits lie how far below the greatest, in 2048 classes; the total weight for top_p.
2. `set_brackets`: the cut lies in certain classes, the *open* ones. What is above them passes, what is below does not.
   For top_k the counts tell. For top_p a class weighs between its count times its least and its greatest weight, and
   the same bounds from the other end are tight where little weight lies beyond the cut.
3. `collect_open`: the open tokens, a few hundred of them, are listed; what passes is summed.
4. sample_cut.py finds the cut among the open tokens.

The bounds need not be exact, only safe: whatever is in doubt is open."""

import triton
import triton.language as tl

from quire.ops.torch.kernels.sample_job import (
    FIELDS,
    FLAGS,
    GREEDY,
    INVERSE_TEMPERATURE,
    NUM_BUCKETS,
    TOP_K,
    TOP_P,
    Job,
    load_line,
)
from quire.ops.torch.kernels.sample_pick import may_be_drawn
from quire.ops.torch.kernels.sample_weights import (
    FLOOR,
    NOTHING,
    ONE,
    finite_peak,
    greatest_of_tiles,
    packed_key,
    weigh,
)

# Columns of the brackets.
FIRST_OPEN = tl.constexpr(0)  # classes before it pass; TOO_MANY
LAST_OPEN = tl.constexpr(1)  # classes after it do not
NUM_PASSED = tl.constexpr(2)  # tokens before the first open class
NUM_OPEN = tl.constexpr(3)  # tokens listed
TOO_MANY = tl.constexpr(-1)  # the open tokens would not fit: the whole line is looked through

# A class is the upper half of a distance's fp32 bits: 128 to a power of two, from 2**-9 to 2**7.
FIRST_CLASS = tl.constexpr((127 - 9) << 7)
DOUBT = tl.constexpr(1e-6)  # relative: a distance is rounded to fp32
MASS_DOUBT = tl.constexpr(1e-9)  # relative to the total: bounds are summed in fp64


def bracket_cuts(job: Job) -> None:
    """job.peaks -> job.filters, all but the cuts, and job.sums of what surely passes."""
    filters, tiles = job.filters, triton.next_power_of_2(job.tiles)
    assert filters is not None
    capacity = filters.open_ids.shape[1]
    options = {"TILE": job.tile, "TILES": tiles, "EDITED": job.edits is not None, "num_warps": 4}
    filters.counts[: job.lines].zero_()
    _count_buckets[(job.tiles, job.lines)](
        *job.source, filters.counts, filters.totals, job.vocab, **options, enable_fp_fusion=False
    )
    _set_brackets[(job.lines,)](
        job.rows,
        job.tables.params,
        filters.counts,
        filters.totals,
        filters.brackets,
        filters.kept_mass,
        job.tiles,
        TILES=tiles,
        CAPACITY=capacity,
        num_warps=8,
    )
    _collect_open[(job.tiles, job.lines)](
        *job.source,
        filters.brackets,
        filters.kept_mass,
        filters.open_ids,
        job.sums,
        job.vocab,
        CAPACITY=capacity,
        **options,
        enable_fp_fusion=False,
    )


@triton.jit
def is_limited(params_of_row):
    """Whether top_k or top_p cut the row's order."""
    top_p = tl.load(params_of_row + TOP_P).to(tl.float64, bitcast=True)
    return (tl.load(params_of_row + TOP_K) > 0) | (top_p < 1.0)


@triton.jit
def _bucket(x, peak):
    """x [n] fp32 -> [n] int32: a greater logit is never in a later bucket."""
    distance = tl.maximum(peak - x, 0.0)
    bucket = (distance.to(tl.int32, bitcast=True) >> 16) - FIRST_CLASS
    return tl.minimum(tl.maximum(bucket, 0), NUM_BUCKETS - 1)


@triton.jit
def _count_buckets(
    logits,
    stride,
    rows,
    params,
    edited,
    peaks,
    counts,  # [lines, NUM_BUCKETS], zeros
    totals,  # [lines, tiles]
    vocab,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, line, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        return
    at = params + row * FIELDS
    if (is_limited(at) == 0) | ((tl.load(at + FLAGS) & GREEDY) != 0):
        return
    peak = finite_peak(greatest_of_tiles(peaks, line, num_tiles, TILES))
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_line(logits, stride, edited, params, row, line, ids, vocab, EDITED)
    found = tl.histogram(_bucket(x, peak), NUM_BUCKETS, mask=x > float("-inf"))
    buckets = tl.arange(0, NUM_BUCKETS)
    tl.atomic_add(counts + line * NUM_BUCKETS + buckets, found, mask=found > 0, sem="relaxed")
    if tl.load(at + TOP_K) == 0:  # else the total is that of the k tokens
        weight = weigh(x, peak, tl.load(at + INVERSE_TEMPERATURE).to(tl.float64, bitcast=True))
        tl.store(totals + line * num_tiles + tile, tl.sum(weight, axis=0))


@triton.jit
def mass_of(share, total):
    """Of a total, the part `share` in (0, 1), rounded up: int64."""
    return tl.minimum(tl.ceil(share * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def _nearest(bucket, inverse_temperature):
    """The least distance in a bucket, in units of the temperature, or a little less: fp64."""
    nearest = ((bucket + FIRST_CLASS) << 16).to(tl.float32, bitcast=True).to(tl.float64)
    return tl.where(bucket == 0, 0.0, nearest * (1.0 - DOUBT) * inverse_temperature)


@triton.jit
def _bounds(count, inverse_temperature):
    """count [NUM_BUCKETS] -> what each bucket weighs at least and at most: fp64."""
    bucket = tl.arange(0, NUM_BUCKETS)
    greatest = tl.exp(-_nearest(bucket, inverse_temperature)) * ONE * (1.0 + DOUBT) + 1.0
    farthest = _nearest(bucket + 1, inverse_temperature) * (1.0 + 3.0 * DOUBT)
    least = tl.exp(-farthest) * ONE * (1.0 - DOUBT) - 1.0
    least = tl.where(bucket == NUM_BUCKETS - 1, 0.0, tl.maximum(least, 0.0))
    return count.to(tl.float64) * least, count.to(tl.float64) * greatest


@triton.jit
def _set_brackets(
    rows,
    params,
    counts,
    totals,
    brackets,  # [lines, 4]
    kept_mass,  # [lines]
    num_tiles,
    TILES: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    line = tl.program_id(0)
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        return
    at = params + row * FIELDS
    out = brackets + line * 4
    tl.store(kept_mass + line, 0)
    tl.store(out + NUM_OPEN, 0)
    tl.store(out + NUM_PASSED, 0)
    if is_limited(at) == 0:
        tl.store(out + FIRST_OPEN, NUM_BUCKETS)
        tl.store(out + LAST_OPEN, NUM_BUCKETS - 1)
        return
    bucket = tl.arange(0, NUM_BUCKETS)
    count = tl.load(counts + line * NUM_BUCKETS + bucket)
    top_k = tl.load(at + TOP_K)
    top_p = tl.load(at + TOP_P).to(tl.float64, bitcast=True)
    inverse_temperature = tl.load(at + INVERSE_TEMPERATURE).to(tl.float64, bitcast=True)
    if top_k > 0:
        first = tl.sum((tl.cumsum(count, axis=0) < top_k).to(tl.int32), axis=0)
        last = first
    else:
        tiles = tl.arange(0, TILES)
        total = tl.sum(tl.load(totals + line * num_tiles + tiles, mask=tiles < num_tiles, other=0), axis=0)
        least, greatest = _bounds(count, inverse_temperature)
        whole, need = total.to(tl.float64), mass_of(top_p, total).to(tl.float64)
        doubt = whole * MASS_DOUBT
        least_up_to, greatest_up_to = tl.cumsum(least, axis=0), tl.cumsum(greatest, axis=0)
        least_beyond = tl.sum(least, axis=0) - least_up_to
        greatest_beyond = tl.sum(greatest, axis=0) - greatest_up_to
        at_most = tl.minimum(greatest_up_to, whole - least_beyond)
        at_least = tl.maximum(least_up_to, whole - greatest_beyond)
        first = tl.sum((at_most + doubt < need).to(tl.int32), axis=0)
        last = tl.sum((at_least - doubt < need).to(tl.int32), axis=0)
    # What weighs nothing is never drawn: whether it passes does not matter.
    last_with_weight = tl.sum((_nearest(bucket, inverse_temperature) < -FLOOR).to(tl.int32), axis=0) - 1
    last = tl.minimum(last, last_with_weight)
    if tl.sum(tl.where(bucket <= last, count, 0), axis=0) <= CAPACITY:
        first = first * 0  # all that may pass fits: list it, and top_p can follow top_k
    elif (top_k > 0) & (top_p < 1.0):
        first = first * 0 + TOO_MANY
    elif tl.sum(tl.where((bucket >= first) & (bucket <= last), count, 0), axis=0) > CAPACITY:
        first = first * 0 + TOO_MANY
    tl.store(out + FIRST_OPEN, first)
    tl.store(out + LAST_OPEN, last)
    tl.store(out + NUM_PASSED, tl.sum(tl.where(bucket < first, count, 0), axis=0))


@triton.jit
def _collect_open(
    logits,
    stride,
    rows,
    params,
    edited,
    peaks,
    brackets,  # [lines, 4]
    kept_mass,  # [lines]
    open_ids,  # [lines, CAPACITY], in no order
    sums,  # [lines, tiles]
    vocab,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    EDITED: tl.constexpr,
):
    tile, line, num_tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    row = tl.load(rows + line).to(tl.int64)
    if row < 0:
        return
    at = params + row * FIELDS
    best = greatest_of_tiles(peaks, line, num_tiles, TILES)
    first = tl.load(brackets + line * 4 + FIRST_OPEN)
    last = tl.load(brackets + line * 4 + LAST_OPEN)
    idle = ((tl.load(at + FLAGS) & GREEDY) != 0) | (packed_key(best) == NOTHING)
    if idle | (first == TOO_MANY):
        return
    peak = finite_peak(best)
    ids = tile * TILE + tl.arange(0, TILE)
    x = load_line(logits, stride, edited, params, row, line, ids, vocab, EDITED)
    bucket = _bucket(x, peak)
    passed = bucket < first
    drawable = tl.zeros((), tl.int64)
    if tl.max(passed.to(tl.int32), axis=0) > 0:
        weight = weigh(x, peak, tl.load(at + INVERSE_TEMPERATURE).to(tl.float64, bitcast=True))
        weight = tl.where(passed, weight, 0)
        tl.atomic_add(kept_mass + line, tl.sum(weight, axis=0), sem="relaxed")
        drawable += tl.sum(tl.where(may_be_drawn(weight, at), weight, 0), axis=0)
    tl.store(sums + line * num_tiles + tile, drawable)
    is_open = ((bucket >= first) & (bucket <= last) & (x > float("-inf"))).to(tl.int32)
    num_open = tl.sum(is_open, axis=0)
    if num_open > 0:
        start = tl.atomic_add(brackets + line * 4 + NUM_OPEN, num_open, sem="relaxed")
        place = start + tl.cumsum(is_open, axis=0) - is_open
        tl.store(open_ids + line * CAPACITY + place, ids, mask=is_open > 0)
