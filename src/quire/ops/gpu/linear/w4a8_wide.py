# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T for 4-bit weights in groups of 128 and many rows of fp8, on Hopper's tensor cores (see w4a8.py).

The warps of a program have different tasks. One copies: for each chunk of 256 inputs the activations, words and scales
of the tile, `stages` chunks ahead, and those of the program's next tile while the last one is stored. Two times four
warps multiply: each has half of the tile's outputs, 64 at a time, makes their weights fp8 in registers, and adds up the
sums of 128 inputs times their scales. While the tensor cores multiply for one of the two, the other one scales and
makes weights: no barrier is for both. A chunk's place is free when both have told so."""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.linear import PROGRAMS
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.w4a8_instructions import UNIT, fp8_instructions
from quire.ops.gpu.linear.w4a8_wide_config import W4A8WideConfig, can_be_wide
from quire.ops.gpu.linear.wide_sums import flat, sum_of_share, take_shares
from quire.ops.gpu.overlap import overlap_options

WARPS = gl.constexpr(4)  # that multiply together
MAX_POLLS = 2000  # for about so many microseconds programs of a tile wait for each other
MULTIPLY_REGISTERS, COPY_REGISTERS = gl.constexpr(240), gl.constexpr(24)  # of a thread
INTEGERS = gl.constexpr(UNIT)


def w4a8_wide_kernel(
    x: QuantizedRows,
    w: GroupedWeight,  # shuffled
    dtype: torch.dtype,
    config: W4A8WideConfig,
    tickets: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """x [M, K] fp8 -> [M, N]"""
    (M, K), N = x.q.shape, w.num_outputs
    assert x.q.dtype == torch.float8_e4m3fn and x.q.is_contiguous() and w.num_inputs == K and x.scales.shape == (M, 1)
    assert w.num_chunks % config.splits == 0, f"{w.num_chunks} chunks, {config.splits} splits"
    assert can_be_wide(w) and dtype.itemsize == 2  # fp32 would take too much shared memory
    out = torch.empty(M, N, dtype=dtype, device=x.q.device)
    tiles_m, tiles_n = triton.cdiv(M, config.block_m), triton.cdiv(N, config.block_n)
    partials = None
    if config.splits > 1:
        tickets = new_tickets(x.q.device) if tickets is None else tickets
        assert 2 * tiles_m * tiles_n <= len(tickets), f"2 x {tiles_m * tiles_n} tiles, {len(tickets)} tickets"
        size = tiles_m * tiles_n * config.splits * config.block_m * config.block_n
        partials = torch.empty(size, dtype=torch.float32, device=x.q.device)
    x_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    words_layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2)
    scales_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    words = w.words.view(N, -1)
    programs = tiles_m * tiles_n * config.splits
    multiprocessors = _multiprocessors(x.q.device)
    _w4a8_wide_kernel[(min(programs, multiprocessors),)](
        TensorDescriptor.from_tensor(x.q, [config.block_m, 128], x_layout),
        TensorDescriptor.from_tensor(words, [config.block_n, 32], words_layout),
        TensorDescriptor.from_tensor(w.scales.view(-1), [config.block_n], scales_layout),
        x.scales,
        out,
        partials,
        tickets if config.splits > 1 else None,
        M,
        N,
        w.num_chunks,
        tiles_m,
        programs,
        BLOCK_M=config.block_m,
        PARTS=config.block_n // 128,
        SPLITS=config.splits,
        STAGES=config.stages,
        OVERLAP=overlap,
        POLLS=MAX_POLLS if programs <= multiprocessors else 0,
        num_warps=WARPS.value,
        **overlap_options(overlap),
    )
    return out


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else PROGRAMS


FIRST_HALF = gl.constexpr(fp8_instructions(range(2)))
SECOND_HALF = gl.constexpr(fp8_instructions(range(2, 4)))
WORDS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )
)  # how the threads of four warps hold words: as an operand of the tensor cores holds quads of fp8


@gluon.jit(do_not_specialize=["M", "chunks", "tiles_m", "tiles"])
def _w4a8_wide_kernel(
    x_desc,
    words_desc,
    scales_desc,
    x_scale_ptr,
    out_ptr,
    partials_ptr,
    tickets_ptr,
    M,
    N,
    chunks,
    tiles_m,
    tiles,
    BLOCK_M: gl.constexpr,
    PARTS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
    POLLS: gl.constexpr,
):
    OUTPUTS: gl.constexpr = 128 * PARTS
    # Tiles are numbered by tokens, then by outputs, then by splits; a program takes every so many of them.
    per_split = tiles // SPLITS
    share = chunks // SPLITS
    work = (tiles_m, per_split, share, gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0)))

    x_slots = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BLOCK_M, 128], x_desc.layout)
    words_slots = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS, 32], words_desc.layout)
    scales_slots = gl.allocate_shared_memory(gl.int32, [STAGES, OUTPUTS], scales_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(full.index(number), count=1)
        mbarrier.init(empty.index(number), count=2)

    slots = (x_slots, words_slots, scales_slots, full, empty)
    parts = (partials_ptr, tickets_ptr)
    to = (x_scale_ptr, out_ptr, M, N)
    sizes: gl.constexpr = (BLOCK_M, SPLITS, STAGES, OVERLAP, PARTS, POLLS)
    gl.warp_specialize(
        [
            (_multiply, (0, slots, parts, to, work, sizes)),
            (_multiply, (1, slots, parts, to, work, sizes)),
            (_copy, (x_desc, words_desc, scales_desc, slots, work, N, sizes)),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, COPY_REGISTERS],
    )


@gluon.jit
def _tile_of(nth, work, sizes: gl.constexpr):
    """The nth tile of a program -> its first token, its first output, its split, and its number among those of the
    split"""
    tiles_m, per_split, _, _ = work
    tile = gl.program_id(0) + nth * gl.num_programs(0)
    split = tile // per_split
    number = tile - split * per_split
    tile_n = number // tiles_m
    return (number - tile_n * tiles_m) * sizes[0], tile_n * (128 * sizes[4]), split, number


@gluon.jit
def _copy(x_desc, words_desc, scales_desc, slots, work, N, sizes: gl.constexpr):
    """What is multiplied, into places that are free: weights before the kernel waits for activations."""
    x_slots, words_slots, scales_slots, full, empty = slots
    BLOCK_M: gl.constexpr = sizes[0]
    STAGES: gl.constexpr = sizes[2]
    OVERLAP: gl.constexpr = sizes[3]
    OUTPUTS: gl.constexpr = 128 * sizes[4]
    BYTES: gl.constexpr = BLOCK_M * 256 + OUTPUTS * 132
    share, mine = work[2], work[3]
    first_token, first_output, split, _ = _tile_of(0, work, sizes)
    for number in gl.static_range(STAGES):
        pred = number < share
        chunk = split * share + number
        place = full.index(number)
        mbarrier.expect(place, BYTES, pred=pred)
        tma.async_copy_global_to_shared(
            words_desc, [first_output, chunk * 32], place, words_slots.index(number), pred=pred
        )
        tma.async_copy_global_to_shared(
            scales_desc, [chunk * N + first_output], place, scales_slots.index(number), pred=pred
        )
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    for number in gl.static_range(STAGES):
        pred = number < share
        chunk = split * share + number
        place = full.index(number)
        for half in gl.static_range(2):
            tma.async_copy_global_to_shared(
                x_desc, [first_token, chunk * 256 + half * 128], place, x_slots.index(2 * number + half), pred=pred
            )
    for nth in range(mine):
        there = gl.minimum(share, STAGES) * gl.cast(nth == 0, gl.int32)
        tile_token, tile_output, tile_split, _ = _tile_of(nth, work, sizes)
        for inside in range(there, share):
            serial = nth * share + inside
            slot = serial % STAGES
            input_chunk = tile_split * share + inside
            arrived = full.index(slot)
            mbarrier.wait(empty.index(slot), (serial // STAGES - 1) & 1)  # returns at once where it is the first
            mbarrier.expect(arrived, BYTES)
            tma.async_copy_global_to_shared(
                words_desc, [tile_output, input_chunk * 32], arrived, words_slots.index(slot)
            )
            tma.async_copy_global_to_shared(
                scales_desc, [input_chunk * N + tile_output], arrived, scales_slots.index(slot)
            )
            for half in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    x_desc, [tile_token, input_chunk * 256 + half * 128], arrived, x_slots.index(2 * slot + half)
                )


@gluon.jit
def _make_weights(words, HALF: gl.constexpr, MMA: gl.constexpr):
    """words [64, 32] of 64 outputs and 256 inputs -> the fp8 weights of half of the inputs [64, 128]. Of four
    neighbouring words each has four of two planes."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    d = gl.float8e4nv
    a, b, c, e = gl.inline_asm_elementwise(
        SECOND_HALF if HALF else FIRST_HALF,
        "=r,=r,=r,=r,r,r,r,r",
        [words],
        (d, d, d, d),
        is_pure=False,
        pack=4,
    )
    planes = gl.join(gl.join(a, b), gl.join(c, e)).permute((0, 3, 2, 1)).reshape([64, 128])
    return gl.convert_layout(planes, OPERAND, assert_trivial=True)


@gluon.jit
def _start(weights, x, place):
    """The sums of 128 inputs, in the registers of `place`, not waited for. One instruction of Gluon, so that nothing
    comes between those of the tensor cores: one for each plane took 6 % longer."""
    return warpgroup_mma(weights, x.permute((1, 0)), place, use_acc=False, is_async=True)


@gluon.jit
def _fp16_at(words, SHIFT: gl.constexpr):
    return (words >> SHIFT).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _add_scaled(acc, sums, scales):
    """acc + sums * scales, here and not later: the next products take the registers of `sums`."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [sums, scales[:, None], acc], gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _multiply(NUMBER: gl.constexpr, slots, parts, to, work, sizes: gl.constexpr):
    """Half of the outputs of each tile, in parts of 64."""
    words_slots, full = slots[1], slots[3]
    BLOCK_M: gl.constexpr = sizes[0]
    OVERLAP: gl.constexpr = sizes[3]
    PARTS: gl.constexpr = sizes[4]
    ROW: gl.constexpr = NUMBER * 64 * PARTS
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    share, mine = work[2], work[3]
    zeros = gl.zeros([64, BLOCK_M], gl.float32, MMA)
    sums = zeros
    mbarrier.wait(full.index(0), 0)
    words = words_slots.index(0).slice(ROW, 64, 0).load(WORDS)
    for nth in range(mine):
        accs = (zeros,) if PARTS == 1 else (zeros, zeros)
        for number in range(nth * share, nth * share + share):
            ahead = gl.minimum(number + 1, mine * share - 1)  # the last one again, after the last
            accs, words, sums = _add_chunk(accs, words, sums, number, ahead, slots, ROW, sizes)
        if OVERLAP:
            gdc_wait()  # returns at once: activations have come
        first_token, first_output, split, tile = _tile_of(nth, work, sizes)
        _finish(accs, (first_token, first_output + ROW, split, 2 * tile + NUMBER), parts, to, sizes)


@gluon.jit
def _add_chunk(accs, words, sums, number, ahead, slots, ROW: gl.constexpr, sizes: gl.constexpr):
    """A chunk's products: of 64 outputs and 128 inputs, one after the other. `sums` are those before they are scaled.
    -> accs, the words of the chunk ahead, sums"""
    x_slots, words_slots, scales_slots, full, empty = slots
    MMA: gl.constexpr = sums.type.layout
    STAGES: gl.constexpr = sizes[2]
    PARTS: gl.constexpr = sizes[4]
    slot = number % STAGES
    for part in gl.static_range(PARTS):
        scales = scales_slots.index(slot).slice(ROW + part * 64, 64, 0).load(gl.SliceLayout(1, sums.type.layout))
        for half in gl.static_range(2):
            weights = _make_weights(words, half, MMA)
            products = _start(weights, x_slots.index(2 * slot + half), sums)
            if half == 1:
                if part + 1 < PARTS:
                    words = words_slots.index(slot).slice(ROW + part * 64 + 64, 64, 0).load(WORDS)
                else:
                    mbarrier.wait(full.index(ahead % STAGES), (ahead // STAGES) & 1)
                    words = words_slots.index(ahead % STAGES).slice(ROW, 64, 0).load(WORDS)
            sums = warpgroup_mma_wait(0, deps=[products])
            if (half == 1) & (part + 1 == PARTS):
                mbarrier.arrive(empty.index(slot))
            accs = _replaced(accs, part, _add_scaled(accs[part], sums, _fp16_at(scales, 16 * half)))
    return accs, words, sums


@gluon.jit
def _replaced(values, NUMBER: gl.constexpr, value):
    """One or two values, of which one is new."""
    return (value,) if len(values) == 1 else ((value, values[1]) if NUMBER == 0 else (values[0], value))


@gluon.jit
def _finish(accs, place, parts, to, sizes: gl.constexpr):
    """accs: the sums of half of a tile's outputs, 64 each."""
    partials_ptr, tickets_ptr = parts
    first_token, first_output, split, tile = place
    BLOCK_M: gl.constexpr = sizes[0]
    SPLITS: gl.constexpr = sizes[1]
    OUTPUTS: gl.constexpr = 64 * sizes[4]
    if SPLITS > 1:
        base = partials_ptr + tile.to(gl.int64) * (SPLITS * OUTPUTS * BLOCK_M)
        for part in gl.static_range(len(accs)):
            sums = flat(accs[part])
            quads = gl.arange(0, 16 * BLOCK_M, gl.SliceLayout(1, sums.type.layout))
            inside = quads[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, sums.type.layout))[None, :]
            gl.store(base + (split * OUTPUTS + part * 64) * BLOCK_M + inside, sums)
        gl.thread_barrier()  # one thread changes the ticket: the sums of all threads come first
        mine, others = take_shares(tickets_ptr + tile, SPLITS, sizes[5])
        ROWS: gl.constexpr = OUTPUTS // SPLITS
        for number in range(SPLITS):
            if (number == mine) | ((others >> number & 1) == 1):
                total = sum_of_share(base, number, ROWS, OUTPUTS, BLOCK_M, SPLITS, WARPS)
                _store(total, first_token, first_output + number * ROWS, to, sizes)
    else:
        for part in gl.static_range(len(accs)):
            _store(accs[part], first_token, first_output + part * 64, to, sizes)


@gluon.jit
def _store(acc, first_token, first_output, to, sizes: gl.constexpr):
    """acc [outputs, tokens]. Lanes write neighbouring outputs of a token, which they get through shared memory."""
    x_scale_ptr, out_ptr, M, N = to
    LANES: gl.constexpr = acc.shape[0] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    columns = first_token + gl.arange(0, sizes[0], gl.SliceLayout(0, acc.type.layout))
    acc *= (gl.load(x_scale_ptr + columns, mask=columns < M, other=0.0) * INTEGERS)[None, :]
    outputs = first_output + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    tokens = first_token + gl.arange(0, sizes[0], gl.SliceLayout(0, LAYOUT))
    offsets = tokens.to(gl.int64)[None, :] * N + outputs[:, None]
    inside = (outputs < N)[:, None] & (tokens < M)[None, :]
    gl.store(out_ptr + offsets, gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LAYOUT), mask=inside)
