# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The kernel of grouped_wide.py for 8 bits in groups of 128: the head's, and those of `int8`.

A chunk of 128 inputs has one scale, which each lane loads for its own rows: with scales in shared memory, for spans of
128 or of 256 inputs, it takes 10 to 40 % longer."""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.wide_planes import halves_of, words_layout
from quire.ops.gpu.linear.wide_sums import finish
from quire.ops.gpu.linear.wide_unpack import operands, unpack_pieces

SLAB = 64  # inputs of activations that are copied at once: two planes of words


def launch_int8(
    grid: tuple[int, int, int],
    x: Tensor,
    weight: GroupedWeight,
    inputs_in_flight: int,
    to: tuple[Tensor | None, ...],
    constants: dict[str, Any],
) -> None:
    """`to`: a bias, the output, partial sums and tickets."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    _wide_int8_kernel[grid](
        TensorDescriptor.from_tensor(x, [constants["BLOCK_M"], SLAB], layout),
        weight.words,
        weight.scales,
        *to,
        len(x),
        weight.num_outputs,
        weight.num_chunks,
        STAGES=inputs_in_flight // SLAB,
        UNPACK=unpack_pieces(8, 0, 0, "none")[0],
        OPERANDS=operands(0, "none"),
        **constants,
    )


@gluon.jit(do_not_specialize=["M", "chunks"])
def _wide_int8_kernel(
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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
    POLLS: gl.constexpr,
    UNPACK: gl.constexpr,
    OPERANDS: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    WORDS: gl.constexpr = words_layout(BLOCK_N, WARPS, 32)
    BYTES: gl.constexpr = BLOCK_M * 64 * 2
    PAIRS: gl.constexpr = 2  # of planes, 64 inputs each: a chunk
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

    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
    slab = 0
    for chunk in range(first, last):
        ahead = gl.minimum(chunk + 1, last - 1)
        next_scales = gl.load(scales_ptr + ahead.to(gl.int64) * N + rows)
        halves = halves_of(words)
        next_words = gl.load(word_ptrs + ahead * 32)
        scale = scales.to(gl.float32)
        main = scale.to(gl.bfloat16)
        rest = (scale - main.to(gl.float32)).to(gl.bfloat16)
        for pair in gl.static_range(PAIRS):
            slot = slab % STAGES
            low, high = gl.inline_asm_elementwise(
                UNPACK,
                OPERANDS,
                [halves[pair], main[:, None], main[:, None], rest[:, None], rest[:, None]],
                (gl.bfloat16, gl.bfloat16),
                is_pure=True,
                pack=2,
            )
            low = gl.convert_layout(low, OPERAND, assert_trivial=True)
            high = gl.convert_layout(high, OPERAND, assert_trivial=True)
            mbarrier.wait(arrived.index(slot), (slab // STAGES) & 1)
            x = x_slots.index(slot).permute((1, 0))
            acc = warpgroup_mma(low, x.slice(0, 32, 0), acc, is_async=True)
            acc = warpgroup_mma(high, x.slice(32, 32, 0), acc, is_async=True)
            acc = warpgroup_mma_wait(2, deps=[acc])
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
    finish(
        acc, out_ptr, bias_ptr, partials_ptr, tickets_ptr, first_output, first_token, N, M,
        SPLITS, BLOCK_N, BLOCK_M, POLLS, WARPS,
    )  # fmt: skip
