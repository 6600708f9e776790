# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""A program's tile of quantized_tiles.py: rows of an expert's weights times routes, as in linear/grouped_wide.py.

What inputs are left behind the last whole span is multiplied first."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from quire.ops.gpu.activation import activate_times
from quire.ops.gpu.linear.wide_planes import halves_of, words_layout
from quire.ops.gpu.linear.wide_scales import load_numbers, num_groups, num_halves, scale_layout, store_scales
from quire.ops.gpu.linear.wide_slab import load_words, multiply_slab


@gluon.jit
def multiply_tile(
    x_desc,
    weight,
    to,
    slot,
    first_row,
    column,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    BITS: gl.constexpr,
    HIGH: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    GROUP: gl.constexpr,
    OFFSET_SCALES: gl.constexpr,
    RESTS: gl.constexpr,
    STAGES: gl.constexpr,
    COPIES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
    UNPACK: gl.constexpr,
    OPERANDS: gl.constexpr,
):
    words_ptr, high_ptr, scales_ptr, offsets_ptr, super_ptr, all_outputs, spans, chunks = weight
    GATED: gl.constexpr = ACTIVATION >= 0
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    WORDS: gl.constexpr = words_layout(BLOCK_N, WARPS, WIDTH)
    SPAN: gl.constexpr = 32 // BITS * WIDTH * PARTS  # inputs
    SLABS: gl.constexpr = SPAN // 64
    GROUPS: gl.constexpr = num_groups(GROUP, SPAN)
    HALF_COUNT: gl.constexpr = num_halves(GROUP, SPAN)
    ITEMS: gl.constexpr = GROUPS // HALF_COUNT
    SCALES: gl.constexpr = scale_layout(HALF_COUNT, WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(1, WORDS)
    X: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    # What is left behind the last whole span: at most one chunk of those that are half a span.
    TAIL_PARTS: gl.constexpr = 1 if PARTS == 2 and TAIL * 2 <= SLABS else PARTS
    TAIL_SPAN: gl.constexpr = SPAN // PARTS * TAIL_PARTS
    TAIL_GROUPS: gl.constexpr = num_groups(GROUP, TAIL_SPAN)
    TAIL_HALVES: gl.constexpr = num_halves(GROUP, TAIL_SPAN)
    TAIL_SCALES: gl.constexpr = scale_layout(TAIL_HALVES, WARPS)
    TAIL_COPIES: gl.constexpr = (TAIL + COPIES - 1) // COPIES
    copies = spans * (SLABS // COPIES) + TAIL_COPIES

    x_slots = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COPIES, BLOCK_M, 64], x_desc.layout)
    x_slabs = x_slots._reinterpret(gl.bfloat16, [STAGES * COPIES, BLOCK_M, 64], X)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    STACK: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pairs = gl.allocate_shared_memory(gl.int32, [2, ITEMS, HALF_COUNT, BLOCK_N], STACK)
    pair_lines = pairs._reinterpret(gl.int32, [2 * GROUPS, BLOCK_N], LINES)
    if SECOND == "none":
        others = pairs
        other_lines = pair_lines
    else:
        others = gl.allocate_shared_memory(gl.int32, [2, ITEMS, HALF_COUNT, BLOCK_N], STACK)
        other_lines = others._reinterpret(gl.int32, [2 * GROUPS, BLOCK_N], LINES)
    for number in gl.static_range(STAGES):
        mbarrier.init(arrived.index(number), count=1)
    x = (x_desc, x_slots, arrived, slot, copies, spans)
    for number in gl.static_range(STAGES - 1):
        _copy(x, number, SLABS, STAGES, COPIES, TAIL_COPIES, BLOCK_M)

    rows = first_row + _rows_of(gl.arange(0, BLOCK_N, ROWS), column, to[5], GATED, BLOCK_N)
    # The words of eight rows of MXFP4 lie together.
    STEP: gl.constexpr = 8 * WIDTH if KIND == "exponents" else WIDTH
    lines = rows // 8 * 8 * chunks + rows % 8 if KIND == "exponents" else rows * chunks
    inside = lines[:, None] * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, WORDS))[None, :]
    word_ptrs = words_ptr + inside
    high_ptrs = high_ptr + inside if HIGH > 0 else word_ptrs
    words = load_words(word_ptrs, 0, PARTS, STEP)
    high = load_words(high_ptrs, 0, PARTS, WIDTH) if HIGH > 0 else ()
    places = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCALES))
    scale_rows = (first_row + _rows_of(places, column, to[5], GATED, BLOCK_N))[None, :]
    half = gl.arange(0, HALF_COUNT, gl.SliceLayout(1, SCALES))[:, None]
    numbers = load_numbers(
        scales_ptr, offsets_ptr, super_ptr, 0, scale_rows, half, all_outputs, KIND, SECOND, GROUP, PARTS, SPAN
    )
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    slab = 0
    if TAIL > 0:
        tail = spans * PARTS // TAIL_PARTS
        tail_words = load_words(word_ptrs, tail, TAIL_PARTS, STEP)
        tail_high = load_words(high_ptrs, tail, TAIL_PARTS, WIDTH) if HIGH > 0 else ()
        tail_places = gl.arange(0, BLOCK_N, gl.SliceLayout(0, TAIL_SCALES))
        tail_rows = (first_row + _rows_of(tail_places, column, to[5], GATED, BLOCK_N))[None, :]
        tail_half = gl.arange(0, TAIL_HALVES, gl.SliceLayout(1, TAIL_SCALES))[:, None]
        tail_numbers = load_numbers(
            scales_ptr, offsets_ptr, super_ptr, tail, tail_rows, tail_half, all_outputs, KIND, SECOND, GROUP,
            TAIL_PARTS, TAIL_SPAN,
        )  # fmt: skip
        tail_pairs = gl.allocate_shared_memory(gl.int32, [1, TAIL_GROUPS // TAIL_HALVES, TAIL_HALVES, BLOCK_N], STACK)
        tail_pair_lines = tail_pairs._reinterpret(gl.int32, [TAIL_GROUPS, BLOCK_N], LINES)
        if SECOND == "none":
            tail_others = tail_pairs
            tail_other_lines = tail_pair_lines
        else:
            tail_others = gl.allocate_shared_memory(
                gl.int32, [1, TAIL_GROUPS // TAIL_HALVES, TAIL_HALVES, BLOCK_N], STACK
            )
            tail_other_lines = tail_others._reinterpret(gl.int32, [TAIL_GROUPS, BLOCK_N], LINES)
        store_scales(tail_numbers, tail_pairs, tail_others, tail_half, 0, KIND, SECOND, GROUP, TAIL_SPAN, OFFSET_SCALES)
        tail_of = ()
        for part in gl.static_range(TAIL_PARTS):
            tail_of = tail_of + halves_of(tail_words[part], KIND == "exponents")
        for number in gl.static_range(TAIL):
            acc = multiply_slab(
                acc, x_slabs, arrived, slab, tail_of, tail_high, tail_pair_lines, tail_other_lines, 0, number,
                BITS, HIGH, WIDTH, SECOND, GROUP, TAIL_GROUPS // TAIL_HALVES, TAIL_HALVES, STAGES, COPIES, WARPS,
                UNPACK, OPERANDS, RESTS,
            )  # fmt: skip
            acc = warpgroup_mma_wait(2, deps=[acc])
            if (number % COPIES == COPIES - 1) | (number == TAIL - 1):
                gl.thread_barrier()
                _copy(x, slab + STAGES - 1, SLABS, STAGES, COPIES, TAIL_COPIES, BLOCK_M)
                slab += 1
    store_scales(numbers, pairs, others, half, 0, KIND, SECOND, GROUP, SPAN, OFFSET_SCALES)
    for span in range(spans):
        ahead = gl.minimum(span + 1, spans - 1)
        numbers = load_numbers(
            scales_ptr, offsets_ptr, super_ptr, ahead, scale_rows, half, all_outputs, KIND, SECOND, GROUP, PARTS, SPAN
        )
        halves = ()
        for part in gl.static_range(PARTS):
            halves = halves + halves_of(words[part], KIND == "exponents")
        next_words = load_words(word_ptrs, ahead, PARTS, STEP)
        next_high = load_words(high_ptrs, ahead, PARTS, WIDTH) if HIGH > 0 else ()
        buffer = span % 2
        for number in gl.static_range(SLABS):
            acc = multiply_slab(
                acc, x_slabs, arrived, slab, halves, high, pair_lines, other_lines, buffer, number,
                BITS, HIGH, WIDTH, SECOND, GROUP, ITEMS, HALF_COUNT, STAGES, COPIES, WARPS, UNPACK, OPERANDS, RESTS,
            )  # fmt: skip
            if number == SLABS - 1:
                store_scales(numbers, pairs, others, half, 1 - buffer, KIND, SECOND, GROUP, SPAN, OFFSET_SCALES)
            acc = warpgroup_mma_wait(2, deps=[acc])
            if number % COPIES == COPIES - 1:
                # All warps are done with the copy before this one: the next one takes its place.
                gl.thread_barrier()
                _copy(x, slab + STAGES - 1, SLABS, STAGES, COPIES, TAIL_COPIES, BLOCK_M)
                slab += 1
        words, high = next_words, next_high
    acc = warpgroup_mma_wait(0, deps=[acc])
    if not RESTS:
        acc *= 4294967296.0  # 2**32: see wide_scales.py
    _finish(acc, to, slot, first_row, column, ACTIVATION, LIMIT, BLOCK_N, BLOCK_M, WARPS)


@gluon.jit
def _rows_of(places, column, N, GATED: gl.constexpr, BLOCK_N: gl.constexpr):
    """The rows of an expert's weights in a program's tile."""
    if GATED:
        outputs = column * (BLOCK_N // 2) + places // 16 * 8 + places % 8
        rows = gl.minimum(outputs, N - 1) + places // 8 % 2 * N
    else:
        rows = gl.minimum(column * BLOCK_N + places, N - 1)
    return rows


@gluon.jit
def _copy(
    x,
    number,
    SLABS: gl.constexpr,
    STAGES: gl.constexpr,
    COPIES: gl.constexpr,
    TAIL_COPIES: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Copy number `number` of a tile's activations; those of the tail are the first."""
    x_desc, x_slots, arrived, slot, copies, spans = x
    slab = number * COPIES
    if TAIL_COPIES > 0:
        slab += gl.where(number < TAIL_COPIES, spans * SLABS, -TAIL_COPIES * COPIES)
    place = number % STAGES
    mbarrier.expect(arrived.index(place), COPIES * BLOCK_M * 64 * 2, pred=number < copies)
    tma.async_copy_global_to_shared(
        x_desc, [slab, slot, 0], arrived.index(place), x_slots.index(place), pred=number < copies
    )


@gluon.jit
def _finish(
    acc,
    to,
    slot,
    first_row,
    column,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    WARPS: gl.constexpr,
):
    """acc [rows of weights, routes]"""
    bias_ptr, expert_weight_ptr, out_ptr, route_ptr, num_routes, N = to
    GATED: gl.constexpr = ACTIVATION >= 0
    MMA: gl.constexpr = acc.type.layout
    OUTPUTS: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    LANES: gl.constexpr = min(OUTPUTS // 8, 16)
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    if bias_ptr is not None:
        places = _rows_of(gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), column, N, GATED, BLOCK_N)
        acc += gl.load(bias_ptr + first_row + places)[:, None]
    outputs = column * OUTPUTS + gl.arange(0, OUTPUTS, gl.SliceLayout(1, LAYOUT))
    slots = slot + gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT))
    routes = gl.load(route_ptr + slots)
    inside = (outputs < N)[:, None] & (routes < num_routes)[None, :]
    if GATED:
        both = acc.reshape([BLOCK_N // 16, 2, 8, BLOCK_M]).permute((0, 2, 3, 1))
        gate, up = gl.split(both)
        values = activate_times(gate, up, ACTIVATION, LIMIT).reshape([OUTPUTS, BLOCK_M])
        to_rows = slots.to(gl.int64)
    else:
        own = gl.load(route_ptr + slot + gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA)))
        values = acc * gl.load(expert_weight_ptr + own, mask=own < num_routes, other=0.0)[None, :]
        to_rows = routes.to(gl.int64)
    offsets = to_rows[None, :] * N + outputs[:, None]
    gl.store(out_ptr + offsets, gl.convert_layout(values.to(out_ptr.dtype.element_ty), LAYOUT), mask=inside)
