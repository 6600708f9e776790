# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T for 4- to 8-bit weights in groups and many rows of 16-bit activations, on Hopper's tensor cores.

Tiles are as wide as registers allow: with 64 x 64 the second-level cache cannot deliver activations as fast as they are
multiplied. A program takes a span of 128 or 256 inputs at a time. It has `stages` copies of the tile's activations in
flight, and unpacks the next weights while the tensor cores multiply the last ones. Weights go from memory into the
registers in which they are multiplied, scaled and rounded to bf16 once, as `dequantize` does (wide_unpack.py). A span's
scales are computed while the span before it is multiplied (wide_scales.py)."""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.wide_config import MIN_SHARE, WideConfig
from quire.ops.gpu.linear.wide_format import high_bits, is_plain_int8, scale_words, wide_format
from quire.ops.gpu.linear.wide_int8 import launch_int8
from quire.ops.gpu.linear.wide_planes import halves_of, words_layout
from quire.ops.gpu.linear.wide_scales import load_numbers, num_groups, num_halves, scale_layout, store_scales
from quire.ops.gpu.linear.wide_slab import SLAB, load_words, multiply_slab, slabs_descriptor
from quire.ops.gpu.linear.wide_sums import finish
from quire.ops.gpu.linear.wide_unpack import operands, unpack_pieces
from quire.ops.gpu.overlap import overlap_options

MIN_SHARED = 512  # splits times tokens of a tile, from which on its programs share the work of adding up


def wide_kernel(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    config: WideConfig,
    tickets: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """x [M, K] bf16 -> [M, N]"""
    (M, K), N, form = x.shape, weight.num_outputs, wide_format(weight)
    assert form is not None and x.dtype == torch.bfloat16 and x.is_contiguous() and weight.num_inputs == K
    assert config.block_n // config.splits >= MIN_SHARE, config
    out = x.new_empty(M, N)
    tiles_m, tiles_n = triton.cdiv(M, config.block_m), triton.cdiv(N, config.block_n)
    copies = config.slab // SLAB
    partials = None
    if config.splits > 1:
        tickets = new_tickets(x.device) if tickets is None else tickets
        assert tiles_m * tiles_n <= len(tickets), f"{tiles_m * tiles_n} tiles, {len(tickets)} tickets"
        size = tiles_m * tiles_n * config.splits * config.block_m * config.block_n
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    grid, to = (tiles_m, tiles_n, config.splits), (bias, out, partials, tickets if config.splits > 1 else None)
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "SPLITS": config.splits,
        "WARPS": config.warps,
        "OVERLAP": overlap,
        "POLLS": _polls(config, tiles_m * tiles_n * config.splits, x.device),
        "num_warps": config.warps,
        **overlap_options(overlap),
        **({"maxnreg": config.registers} if config.registers else {}),
    }
    if is_plain_int8(weight):
        launch_int8(grid, x, weight, config.stages * config.slab, to, constants)
        return out
    parts = 1 if weight.bits == 8 and config.block_m <= 64 else form.parts  # there are registers for no more
    _wide_kernel[grid](
        slabs_descriptor(x, config.block_m, copies),
        weight.words,
        weight.high,
        scale_words(weight),
        weight.offsets,
        weight.super_scales,
        *to,
        M,
        N,
        weight.num_chunks // parts,
        BITS=weight.bits,
        HIGH=high_bits(weight),
        WIDTH=weight.width,
        PARTS=parts,
        KIND=form.kind,
        SECOND=form.second,
        GROUP=form.group,
        OFFSET_SCALES=form.offset_scales,
        STAGES=config.stages,
        COPIES=copies,
        UNPACK=unpack_pieces(weight.bits, high_bits(weight), form.zero, form.second),
        OPERANDS=operands(high_bits(weight), form.second),
        **constants,
    )
    return out


def _polls(config: WideConfig, programs: int, device: torch.device) -> int:
    """Few sums are added up by one program in less time than programs wait for each other, and programs that have no
    room at the same time would wait in vain."""
    if config.splits * config.block_m < MIN_SHARED or device.type != "cuda":
        return 0
    room = config.resident * torch.cuda.get_device_properties(device).multi_processor_count
    return config.polls if programs <= room else 0


@gluon.jit(do_not_specialize=["M", "spans"])
def _wide_kernel(
    x_desc,
    words_ptr,
    high_ptr,
    scales_ptr,
    offsets_ptr,
    super_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    tickets_ptr,
    M,
    N,
    spans,
    BITS: gl.constexpr,
    HIGH: gl.constexpr,
    WIDTH: gl.constexpr,
    PARTS: gl.constexpr,
    KIND: gl.constexpr,
    SECOND: gl.constexpr,
    GROUP: gl.constexpr,
    OFFSET_SCALES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    COPIES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    POLLS: gl.constexpr,
    UNPACK: gl.constexpr,
    OPERANDS: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    WORDS: gl.constexpr = words_layout(BLOCK_N, WARPS, WIDTH)
    BYTES: gl.constexpr = COPIES * BLOCK_M * 64 * 2
    SPAN: gl.constexpr = 32 // BITS * WIDTH * PARTS  # inputs
    SLABS: gl.constexpr = SPAN // 64
    GROUPS: gl.constexpr = num_groups(GROUP, SPAN)
    HALF_COUNT: gl.constexpr = num_halves(GROUP, SPAN)
    ITEMS: gl.constexpr = GROUPS // HALF_COUNT
    SCALES: gl.constexpr = scale_layout(HALF_COUNT, WARPS)
    ROWS: gl.constexpr = gl.SliceLayout(1, WORDS)
    X: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    first_token = gl.program_id(0) * BLOCK_M
    first_output = gl.program_id(1) * BLOCK_N
    share = gl.cdiv(spans, SPLITS)
    first = gl.program_id(2) * share
    last = gl.minimum(first + share, spans)
    slabs = (last - first) * (SLABS // COPIES)

    x_slots = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COPIES, BLOCK_M, 64], x_desc.layout)
    x_slabs = x_slots._reinterpret(gl.bfloat16, [STAGES * COPIES, BLOCK_M, 64], X)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    STACK: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
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

    rows = gl.minimum(first_output + gl.arange(0, BLOCK_N, ROWS), N - 1)
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, WORDS))
    inside = (rows.to(gl.int64) * (spans * PARTS))[:, None] * WIDTH + columns[None, :]
    word_ptrs = words_ptr + inside
    begin = gl.minimum(first, spans - 1)
    words = load_words(word_ptrs, begin, PARTS, WIDTH)
    high_ptrs = high_ptr + inside if HIGH > 0 else word_ptrs
    high = load_words(high_ptrs, begin, PARTS, WIDTH) if HIGH > 0 else ()
    scale_rows = gl.minimum(first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCALES)), N - 1)[None, :]
    half = gl.arange(0, HALF_COUNT, gl.SliceLayout(1, SCALES))[:, None]
    numbers = load_numbers(
        scales_ptr, offsets_ptr, super_ptr, begin, scale_rows, half, N, KIND, SECOND, GROUP, PARTS, SPAN
    )
    store_scales(numbers, pairs, others, half, 0, KIND, SECOND, GROUP, SPAN, OFFSET_SCALES)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # weights are loaded before, activations after
    for number in gl.static_range(STAGES - 1):
        mbarrier.expect(arrived.index(number), BYTES, pred=number < slabs)
        tma.async_copy_global_to_shared(
            x_desc,
            [first * SLABS + number * COPIES, first_token, 0],
            arrived.index(number),
            x_slots.index(number),
            pred=number < slabs,
        )

    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    slab = 0
    for span in range(first, last):
        ahead = gl.minimum(span + 1, last - 1)
        numbers = load_numbers(
            scales_ptr, offsets_ptr, super_ptr, ahead, scale_rows, half, N, KIND, SECOND, GROUP, PARTS, SPAN
        )
        halves = ()
        for part in gl.static_range(PARTS):
            halves = halves + halves_of(words[part])
        next_words = load_words(word_ptrs, ahead, PARTS, WIDTH)
        next_high = load_words(high_ptrs, ahead, PARTS, WIDTH) if HIGH > 0 else ()
        buffer = (span - first) % 2
        for number in gl.static_range(SLABS):
            acc = multiply_slab(
                acc, x_slabs, arrived, slab, halves, high, pair_lines, other_lines, buffer, number,
                BITS, HIGH, WIDTH, SECOND, GROUP, ITEMS, HALF_COUNT, STAGES, COPIES, WARPS, UNPACK, OPERANDS,
            )  # fmt: skip
            if number == SLABS - 1:
                store_scales(numbers, pairs, others, half, 1 - buffer, KIND, SECOND, GROUP, SPAN, OFFSET_SCALES)
            acc = warpgroup_mma_wait(2, deps=[acc])
            if number % COPIES == COPIES - 1:
                # All warps are done with the copy before this one: the next one takes its place.
                gl.thread_barrier()
                coming = slab + STAGES - 1
                place = coming % STAGES
                mbarrier.expect(arrived.index(place), BYTES, pred=coming < slabs)
                tma.async_copy_global_to_shared(
                    x_desc,
                    [first * SLABS + coming * COPIES, first_token, 0],
                    arrived.index(place),
                    x_slots.index(place),
                    pred=coming < slabs,
                )
                slab += 1
        words, high = next_words, next_high
    acc = warpgroup_mma_wait(0, deps=[acc])
    finish(
        acc, out_ptr, bias_ptr, partials_ptr, tickets_ptr, first_output, first_token, N, M,
        SPLITS, BLOCK_N, BLOCK_M, POLLS, WARPS,
    )  # fmt: skip
