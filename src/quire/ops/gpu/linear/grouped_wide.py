# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T for 4- and 8-bit weights in groups of 128 and many rows of 16-bit activations, on Hopper's tensor cores.

Tiles are as wide as registers allow: with 64 x 64 the second-level cache cannot deliver activations as fast as they are
multiplied. A program has one copy of the tile's activations in flight for each of `stages`, 64 inputs each, and unpacks
the next weights while the tensor cores multiply the last ones. Weights go from memory into the registers in which they
are multiplied. `scaling` says how scales are applied:

    bf16    weights are multiplied with the scale in bf16: two roundings
    pair    with the scale as the sum of two bf16: one rounding, as `dequantize`
    sums    sums of 128 inputs are, in fp32: none
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.wide_config import WideConfig, can_be_wide
from quire.ops.gpu.linear.wide_sums import flat, sum_of_share, take_shares
from quire.ops.gpu.overlap import overlap_options

SLAB = 64  # inputs of activations that are copied at once: two planes of words
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
    (M, K), N = x.shape, weight.num_outputs
    assert can_be_wide(weight) and x.dtype == torch.bfloat16 and x.is_contiguous() and weight.num_inputs == K
    out = x.new_empty(M, N)
    tiles_m, tiles_n = triton.cdiv(M, config.block_m), triton.cdiv(N, config.block_n)
    partials = None
    if config.splits > 1:
        tickets = new_tickets(x.device) if tickets is None else tickets
        assert tiles_m * tiles_n <= len(tickets), f"{tiles_m * tiles_n} tiles, {len(tickets)} tickets"
        size = tiles_m * tiles_n * config.splits * config.block_m * config.block_n
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    _wide_kernel[(tiles_m, tiles_n, config.splits)](
        TensorDescriptor.from_tensor(x, [config.block_m, SLAB], layout),
        weight.words,
        weight.scales,
        bias,
        out,
        partials,
        tickets if config.splits > 1 else None,
        M,
        N,
        weight.num_chunks,
        HAS_POINTS=weight.has_zero_points,
        ZERO=weight.zero,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        SPLITS=config.splits,
        STAGES=config.stages,
        SCALING=config.scaling,
        LATE=config.late,
        PENDING=config.pending,
        WARPS=config.warps,
        BITS=weight.bits,
        OVERLAP=overlap,
        POLLS=_polls(config, tiles_m * tiles_n * config.splits, x.device),
        UNPACK=unpack_planes(weight.bits, config.scaling),
        num_warps=config.warps,
        **overlap_options(overlap),
        **({"maxnreg": config.registers} if config.registers else {}),
    )
    return out


def _polls(config: WideConfig, programs: int, device: torch.device) -> int:
    """Few sums are added up by one program in less time than programs wait for each other, and programs that have no
    room at the same time would wait in vain."""
    if config.splits * config.block_m < MIN_SHARED or device.type != "cuda":
        return 0
    room = config.resident * torch.cuda.get_device_properties(device).multi_processor_count
    return config.polls if programs <= room else 0


HALVES = gl.constexpr("prmt.b32 $0, $2, $3, 0x5410; prmt.b32 $1, $2, $3, 0x7632;")


def unpack_planes(bits: int, scaling: str) -> tuple[str, ...]:
    """Instructions for each pair of planes in half a word."""
    return tuple(_unpack(bits, shift, scaling) for shift in range(0, 16, 2 * bits))


def _unpack(bits: int, shift: int, scaling: str) -> str:
    """Halves of two words in $2 -> two planes in $0, $1: (128 + q) + $3, or 8 bits as they are, times $4, or $4 +
    $5."""
    lines = [".reg .b32 one, minus, a, s, t;", "mov.b32 one, 0x3F803F80;", "mov.b32 minus, 0xBF80BF80;"]
    for plane in (0, 1):
        result = f"${plane}" if scaling == "sums" else "s"
        lines.append(f"shr.u32 a, $2, {shift + bits * plane};")
        if bits == 4:
            lines.append("lop3.b32 s, a, 0x000F000F, 0x43004300, 0xEA;")
            lines.append(f"fma.rn.bf16x2 {result}, s, one, $3;")
        else:  # as in unpack.py: 128 + the low seven bits, less 128 or 256
            lines.append("lop3.b32 s, a, 0x007F007F, 0x43004300, 0xEA;")
            lines.append("lop3.b32 t, a, 0x00800080, 0x43004300, 0xEA;")
            lines.append(f"fma.rn.bf16x2 {result}, t, minus, s;")
        if scaling == "bf16":
            lines.append(f"mul.rn.bf16x2 ${plane}, s, $4;")
        if scaling == "pair":
            lines += ["mul.rn.bf16x2 t, s, $5;", f"fma.rn.bf16x2 ${plane}, s, $4, t;"]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _words_layout(rows, warps):
    """How threads hold words [rows, 32]: as an operand of the tensor cores holds 16-bit values."""
    registers = [[0, 1], [8, 0], [0, 8], [0, 16]]
    warp_rows, step = [], 16
    while step < 16 * warps:
        warp_rows.append([step, 0])
        step *= 2
    while step < rows:
        registers.append([step, 0])
        step *= 2
    return gl.DistributedLinearLayout(registers, [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], warp_rows, [], [rows, 32])


@gluon.jit
def _scale_and_less(word, NUMBER: gl.constexpr, BITS: gl.constexpr, HAS_POINTS: gl.constexpr, ZERO: gl.constexpr):
    """For the chunk's group NUMBER: its scale in fp32, and -(128 + zero) in bf16. A chunk of 8 bits has one group, and
    no zero."""
    if BITS == 8:
        scale = word.to(gl.float32)
        less = scale.to(gl.bfloat16)
    else:
        SHIFT: gl.constexpr = NUMBER * (32 if HAS_POINTS else 16)
        scale = (word >> SHIFT).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        point = (word >> (SHIFT + 16)).to(gl.int32) & 0x7F if HAS_POINTS else (word & 0).to(gl.int32) + ZERO
        less = (point | 0xC300).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return scale, less


@gluon.jit(do_not_specialize=["M", "chunks"])
def _wide_kernel(
    x_desc,
    words_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    tickets_ptr,
    M,
    N,
    chunks,
    BITS: gl.constexpr,
    HAS_POINTS: gl.constexpr,
    ZERO: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALING: gl.constexpr,
    LATE: gl.constexpr,
    PENDING: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    POLLS: gl.constexpr,
    UNPACK: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = _words_layout(BLOCK_N, WARPS)
    BYTES: gl.constexpr = BLOCK_M * 64 * 2
    PAIRS: gl.constexpr = 16 // BITS  # of planes, 64 inputs each: a chunk
    first_token = gl.program_id(0) * BLOCK_M
    first_output = gl.program_id(1) * BLOCK_N
    share = gl.cdiv(chunks, SPLITS)
    first = gl.program_id(2) * share
    last = gl.minimum(first + share, chunks)
    slabs = (last - first) * PAIRS

    x_slots = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, 64], x_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(arrived.index(number), count=1)

    rows = gl.minimum(first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(1, WORDS)), N - 1)
    columns = gl.arange(0, 32, gl.SliceLayout(0, WORDS))
    word_ptrs = words_ptr + (rows.to(gl.int64) * chunks)[:, None] * 32 + columns[None, :]
    begin = gl.minimum(first, chunks - 1)
    words = gl.load(word_ptrs + begin * 32)
    scales = gl.load(scales_ptr + begin.to(gl.int64) * N + rows)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # weights are loaded before, activations after
    for number in gl.static_range(STAGES - 1):
        mbarrier.expect(arrived.index(number), BYTES, pred=number < slabs)
        tma.async_copy_global_to_shared(
            x_desc,
            [first_token, first * (PAIRS * 64) + number * 64],
            arrived.index(number),
            x_slots.index(number),
            pred=number < slabs,
        )

    sum_rows = gl.minimum(first_output + gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA)), N - 1)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    slab = 0
    for chunk in range(first, last):
        ahead = gl.minimum(chunk + 1, last - 1)
        next_scales = gl.load(scales_ptr + ahead.to(gl.int64) * N + rows)
        halves = gl.inline_asm_elementwise(HALVES, "=r,=r,r,r", [words], (gl.int16, gl.int16), is_pure=True, pack=2)
        if not LATE:
            next_words = gl.load(word_ptrs + ahead * 32)
        if SCALING == "sums":
            sum_words = gl.load(scales_ptr + gl.cast(chunk, gl.int64) * N + sum_rows)
        for pair in gl.static_range(PAIRS):
            slot = slab % STAGES
            if LATE and pair == PAIRS // 2:
                next_words = gl.load(word_ptrs + ahead * 32)
            scale, less = _scale_and_less(scales, pair // 2, BITS, HAS_POINTS, ZERO)
            main = scale.to(gl.bfloat16)
            rest = (scale - main.to(gl.float32)).to(gl.bfloat16)
            low, high = gl.inline_asm_elementwise(
                UNPACK[pair % (PAIRS // 2)],
                "=r,=r,r,r,r,r",
                [halves[pair // (PAIRS // 2)], less[:, None], main[:, None], rest[:, None]],
                (gl.bfloat16, gl.bfloat16),
                is_pure=True,
                pack=2,
            )
            low = gl.convert_layout(low, OPERAND, assert_trivial=True)
            high = gl.convert_layout(high, OPERAND, assert_trivial=True)
            mbarrier.wait(arrived.index(slot), (slab // STAGES) & 1)
            x = x_slots.index(slot).permute((1, 0))
            if SCALING == "sums":
                if pair % 2 == 0:
                    part = warpgroup_mma(low, x.slice(0, 32, 0), zeros, use_acc=False, is_async=True)
                else:
                    part = warpgroup_mma(low, x.slice(0, 32, 0), part, is_async=True)
                part = warpgroup_mma(high, x.slice(32, 32, 0), part, is_async=True)
                part = warpgroup_mma_wait(2 * (1 - pair % 2), deps=[part])
                if pair % 2 == 1:
                    acc += part * _scale_and_less(sum_words, pair // 2, BITS, HAS_POINTS, ZERO)[0][:, None]
            else:
                acc = warpgroup_mma(low, x.slice(0, 32, 0), acc, is_async=True)
                if PENDING == 1:
                    acc = warpgroup_mma_wait(1, deps=[acc])
                acc = warpgroup_mma(high, x.slice(32, 32, 0), acc, is_async=True)
                acc = warpgroup_mma_wait(PENDING, deps=[acc])
            # All warps are done with the slab before this one: the next copy takes its place.
            gl.thread_barrier()
            coming = slab + STAGES - 1
            place = coming % STAGES
            mbarrier.expect(arrived.index(place), BYTES, pred=coming < slabs)
            tma.async_copy_global_to_shared(
                x_desc,
                [first_token, first * (PAIRS * 64) + coming * 64],
                arrived.index(place),
                x_slots.index(place),
                pred=coming < slabs,
            )
            slab += 1
        words, scales = next_words, next_scales
    acc = warpgroup_mma_wait(0, deps=[acc])

    if SPLITS > 1:
        tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
        base = partials_ptr + tile.to(gl.int64) * (SPLITS * BLOCK_N * BLOCK_M)
        sums = flat(acc)
        quads = gl.arange(0, BLOCK_N * BLOCK_M // 4, gl.SliceLayout(1, sums.type.layout))
        inside = quads[:, None] * 4 + gl.arange(0, 4, gl.SliceLayout(0, sums.type.layout))[None, :]
        gl.store(base + gl.program_id(2) * (BLOCK_N * BLOCK_M) + inside, sums)
        gl.thread_barrier()  # one thread changes the ticket: the sums of all threads come first
        mine, others = take_shares(tickets_ptr + tile, SPLITS, POLLS)
        ROWS: gl.constexpr = BLOCK_N // SPLITS
        for number in range(SPLITS):
            if (number == mine) | ((others >> number & 1) == 1):
                total = sum_of_share(base, number, ROWS, BLOCK_N, BLOCK_M, SPLITS, WARPS)
                _store(out_ptr, bias_ptr, total, first_output + number * ROWS, first_token, N, M, WARPS)
    else:
        _store(out_ptr, bias_ptr, acc, first_output, first_token, N, M, WARPS)


@gluon.jit
def _store(out_ptr, bias_ptr, acc, first_output, first_token, N, M, WARPS: gl.constexpr):
    """acc [outputs, tokens]. Lanes write neighbouring outputs of a token, which they get through shared memory: as they
    leave the tensor cores, a lane has one of every token."""
    LANES: gl.constexpr = min(acc.shape[0] // 8, 16)
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [LANES, 32 // LANES], [1, WARPS], [0, 1])
    outputs = first_output + gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT))
    tokens = first_token + gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    if bias_ptr is not None:
        places = first_output + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
        acc += gl.load(bias_ptr + places, mask=places < N, other=0.0).to(gl.float32)[:, None]
    offsets = tokens.to(gl.int64)[None, :] * N + outputs[:, None]
    inside = (outputs < N)[:, None] & (tokens < M)[None, :]
    gl.store(out_ptr + offsets, gl.convert_layout(acc.to(out_ptr.dtype.element_ty), LAYOUT), mask=inside)
