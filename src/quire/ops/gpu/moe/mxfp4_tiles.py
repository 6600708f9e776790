# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Grouped GEMMs of MXFP4 experts on Hopper: tiles of routes times rows of an expert's weights.

Warps of a program have different tasks. One or two pipelines take tiles of their own. In a pipeline one warp copies:
for each chunk of 128 inputs the activations, words and exponents of the tile, `stages` chunks ahead, and those of the
next tile while the last one is stored. Two groups of four warps multiply: each has 64 rows of weights, makes bf16 of
their four bits in registers, which the tensor cores read, and adds up all inputs. A chunk's place is free when both
have told so. While one pipeline stores a tile, the other one multiplies.

Rows of x are in the order of the tiles (gathering.py). Of 16 rows of weights eight are of the tile's first half and
eight of the second one: with an activation these are gate and up, so both sums of an output are in one thread. Sums
have another order than those of quantized.py, so it is not for `batch_invariant`."""

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.linear.e2m1 import EIGHT
from quire.ops.gpu.linear.linear import PROGRAMS
from quire.ops.gpu.linear.wide_format import scale_words
from quire.ops.gpu.linear.wide_slab import slabs_descriptor
from quire.ops.gpu.moe.mxfp4_config import MXFP4Tile, can_stream
from quire.ops.gpu.moe.mxfp4_multiply import HALF, is_half, multiply, next_slot
from quire.ops.gpu.moe.quantized import QuantizedExperts
from quire.ops.gpu.moe.sorting import RoutedTokens, find_tile
from quire.ops.gpu.overlap import overlap_options

COPY_REGISTERS = gl.constexpr(24)
MULTIPLY_REGISTERS = gl.constexpr({1: 208, 2: 112})  # of a thread, by the number of pipelines


def mxfp4_expert_gemm(
    x: Tensor,
    experts: QuantizedExperts,
    biases: Tensor | None,
    expert_weights: Tensor,
    out: Tensor,
    routed: RoutedTokens,
    config: MXFP4Tile,
    activation: int = -1,
    limit: float = 0.0,
    overlap: bool = False,
) -> None:
    """x [tiles * block, K], in the order of the tiles. With an activation: -> out [tiles * block, N], gate and up, in
    the same order. Without: -> out [routes, N], times the routes' weights."""
    w, N, K = experts.rows, out.shape[1], x.shape[1]
    assert can_stream(experts) and w.num_inputs == K
    assert x.is_contiguous() and out.is_contiguous() and expert_weights.is_contiguous()
    assert config.pipelines == 2 or config.together == 1
    half = HALF.value
    columns = triton.cdiv(N, half if activation >= 0 else 2 * half)
    num_tiles = len(routed.tile_experts)
    lines = w.words.view(-1, w.num_chunks * EIGHT, 16)  # of eight rows
    lines_layout = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=3)
    bytes_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    _mxfp4_experts_kernel[(min(_multiprocessors(x.device), num_tiles * columns),)](
        slabs_descriptor(x, config.block_m, 2),
        slabs_descriptor(x, config.block_m // 2, 2) if config.halves else None,
        TensorDescriptor.from_tensor(lines, [half // EIGHT, EIGHT, 16], lines_layout),
        TensorDescriptor.from_tensor(scale_words(w).view(-1), [half], bytes_layout),
        biases,
        expert_weights,
        out,
        routed.routes,
        routed.tile_experts,
        num_tiles,
        columns,
        routed.num_routes,
        experts.num_experts,
        w.num_outputs // experts.num_experts,
        w.num_outputs,
        N,
        w.num_chunks,
        ACTIVATION=activation,
        LIMIT=limit,
        STAGES=config.stages,
        BLOCK_M=config.block_m,
        PIPELINES=config.pipelines,
        TOGETHER=config.together,
        TILES_A_GROUP=config.group,
        OVERLAP=overlap,
        num_warps=4 * config.together,
        **overlap_options(overlap),
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else PROGRAMS


NOT_SPECIALIZED = ["num_tiles", "columns", "num_routes", "num_experts", "expert_outputs", "all_outputs", "chunks"]


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def _mxfp4_experts_kernel(
    x_desc,
    x_half_desc,
    words_desc,
    exponents_desc,
    bias_ptr,
    expert_weight_ptr,
    out_ptr,
    route_ptr,
    tile_expert_ptr,
    num_tiles,
    columns,
    num_routes,
    num_experts,
    expert_outputs,
    all_outputs,
    N,
    chunks,
    ACTIVATION: gl.constexpr,
    LIMIT: gl.constexpr,
    STAGES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PIPELINES: gl.constexpr,
    TOGETHER: gl.constexpr,
    TILES_A_GROUP: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    work = (tile_expert_ptr, route_ptr, num_routes, num_tiles, columns, num_experts, expert_outputs, chunks)
    to = (bias_ptr, expert_weight_ptr, out_ptr, route_ptr, num_routes, N)
    HALVES: gl.constexpr = x_half_desc is not None
    # As the functions of both files take them, by number.
    sizes: gl.constexpr = (BLOCK_M, STAGES, TILES_A_GROUP, ACTIVATION, LIMIT, OVERLAP, PIPELINES, HALVES, TOGETHER)
    descs = (x_desc, x_half_desc, words_desc, exponents_desc, all_outputs)
    slots = _allocate(descs, sizes)
    REGISTERS: gl.constexpr = MULTIPLY_REGISTERS[PIPELINES]
    if PIPELINES == 1:
        gl.warp_specialize(
            [
                (multiply, (0, 0, slots, to, work, sizes)),
                (multiply, (0, 1, slots, to, work, sizes)),
                (_copy, (0, descs, slots, work, N, sizes)),
            ],
            [4, 1],
            [REGISTERS, COPY_REGISTERS],
        )
    else:
        others = _allocate(descs, sizes)
        if TOGETHER == 2:
            gl.warp_specialize(
                [
                    (multiply, (0, 0, slots, to, work, sizes)),
                    (multiply, (1, 0, others, to, work, sizes)),
                    (_copy, (0, descs, slots, work, N, sizes)),
                    (_copy, (1, descs, others, work, N, sizes)),
                ],
                [8, 1, 1],
                [REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
            )
        else:
            gl.warp_specialize(
                [
                    (multiply, (0, 0, slots, to, work, sizes)),
                    (multiply, (0, 1, slots, to, work, sizes)),
                    (multiply, (1, 0, others, to, work, sizes)),
                    (multiply, (1, 1, others, to, work, sizes)),
                    (_copy, (0, descs, slots, work, N, sizes)),
                    (_copy, (1, descs, others, work, N, sizes)),
                ],
                [4, 4, 4, 1, 1],
                [REGISTERS, REGISTERS, REGISTERS, COPY_REGISTERS, COPY_REGISTERS],
            )


@gluon.jit
def _allocate(descs, sizes: gl.constexpr):
    """Places of a pipeline's chunks, and barriers that tell when they are full and empty."""
    x_desc, _x_half_desc, words_desc, exponents_desc, _all_outputs = descs
    STAGES: gl.constexpr = sizes[1]
    x_slots = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2, sizes[0], 64], x_desc.layout)
    words_slots = gl.allocate_shared_memory(gl.int32, [2 * STAGES, HALF // 8, 8, 16], words_desc.layout)
    exponents_slots = gl.allocate_shared_memory(gl.int32, [2 * STAGES, HALF], exponents_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(full.index(number), count=1)
        mbarrier.init(empty.index(number), count=2 // sizes[8])
    return x_slots, words_slots, exponents_slots, full, empty


@gluon.jit
def _copy(PIPELINE: gl.constexpr, descs, slots, work, N, sizes: gl.constexpr):
    """What is multiplied, into places that are free."""
    x_desc, x_half_desc, words_desc, exponents_desc, all_outputs = descs
    x_slots, words_slots, exponents_slots, full, empty = slots
    tile_expert_ptr, route_ptr, num_routes, num_tiles, columns, num_experts, expert_outputs, chunks = work
    BLOCK_M: gl.constexpr = sizes[0]
    STAGES: gl.constexpr = sizes[1]
    if sizes[5]:
        gdc_launch_dependents()
        gdc_wait()
    slot = 0
    phase = 1  # places are free at first
    for number in range(
        PIPELINE * gl.num_programs(0) + gl.program_id(0), num_tiles * columns, sizes[6] * gl.num_programs(0)
    ):
        tile, column = find_tile(number, num_tiles, columns, sizes[2])
        expert = gl.load(tile_expert_ptr + tile)
        if (expert >= 0) & (expert < num_experts):
            row = expert * expert_outputs + column * (HALF if sizes[3] >= 0 else 2 * HALF)
            other_row = row + (N if sizes[3] >= 0 else HALF)
            half = is_half(route_ptr, num_routes, tile, sizes)
            for chunk in range(chunks):
                arrived = full.index(slot)
                mbarrier.wait(empty.index(slot), phase)
                mbarrier.expect(arrived, BLOCK_M * 256 + HALF * 136, pred=half == 0)
                mbarrier.expect(arrived, BLOCK_M * 128 + HALF * 136, pred=half)
                tma.async_copy_global_to_shared(
                    words_desc, [row // 8, chunk * 8, 0], arrived, words_slots.index(2 * slot)
                )
                tma.async_copy_global_to_shared(
                    words_desc, [other_row // 8, chunk * 8, 0], arrived, words_slots.index(2 * slot + 1)
                )
                tma.async_copy_global_to_shared(
                    exponents_desc, [chunk * all_outputs + row], arrived, exponents_slots.index(2 * slot)
                )
                tma.async_copy_global_to_shared(
                    exponents_desc, [chunk * all_outputs + other_row], arrived, exponents_slots.index(2 * slot + 1)
                )
                place = [chunk * 2, tile * BLOCK_M, 0]
                if sizes[7]:
                    halves = x_slots._reinterpret(gl.bfloat16, [2 * STAGES, 2, BLOCK_M // 2, 64], x_half_desc.layout)
                    tma.async_copy_global_to_shared(x_half_desc, place, arrived, halves.index(2 * slot), pred=half)
                    tma.async_copy_global_to_shared(x_desc, place, arrived, x_slots.index(slot), pred=half == 0)
                else:
                    tma.async_copy_global_to_shared(x_desc, place, arrived, x_slots.index(slot))
                slot, phase = next_slot(slot, phase, STAGES)
