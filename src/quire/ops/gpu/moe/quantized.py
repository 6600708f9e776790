# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The products of a mixture whose experts are groups of 4- to 8-bit codes: routes and tiles as in `moe`, codes as in
`quant_linear`. The rows of all experts are one matrix, so that expert e's begin at row e * outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.activation import activate_times
from quire.ops.gpu.linear.grouped import group_sums
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.grouped_scales import append, load_scales, offset_of, scale_of
from quire.ops.gpu.linear.unpack import asm_for, table_of, take_planes, unpack

MAX_TILE_ROUTES = 64  # of a tile
# routes a tile: (outputs a program, warps, stages)
CONFIGS = {16: (64, 4, 3), 32: (64, 4, 3), 64: (64, 4, 3)}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedExperts:
    num_experts: int
    rows: GroupedWeight  # [num_experts * outputs, inputs]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


def can_stack(parts: Sequence[GroupedWeight]) -> bool:
    kinds = {(w.bits, w.group, w.width, w.zero, w.has_offsets, w.table, *map(_dtype, _tensors(w))) for w in parts}
    return len(kinds) == 1


def _tensors(weight: GroupedWeight) -> tuple[Tensor | None, ...]:
    return weight.scales, weight.offsets, weight.super_scales, weight.high


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def stack_experts(parts: Sequence[GroupedWeight], num_experts: int) -> QuantizedExperts:
    """The parts of one expert after those of the other; they differ in nothing but outputs and tensors."""
    scales, offsets, super_scales, high = zip(*map(_tensors, parts), strict=True)
    rows = replace(
        parts[0],
        num_outputs=sum(part.num_outputs for part in parts),
        words=torch.cat([part.words for part in parts]),
        scales=torch.cat(scales, dim=1),
        offsets=_joined(offsets, dim=1),
        super_scales=_joined(super_scales, dim=1),
        high=_joined(high, dim=0),
    )
    return QuantizedExperts(num_experts, rows)


def _joined(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
    """None where no part has one."""
    present = [part for part in parts if part is not None]
    return torch.cat(present, dim) if present else None


def quantized_expert_gemm(
    x: Tensor,
    experts: QuantizedExperts,
    biases: Tensor | None,
    expert_weights: Tensor,
    out: Tensor,
    routes: Tensor,
    tile_experts: Tensor,
    block: int,
    routes_a_row: int,
    activation: int,
) -> None:
    """out[route] = x[route // routes_a_row] @ w[expert].T: with an activation, of gate and up rows; without one, times
    the route's weight."""
    w, (num_routes, N), K = experts.rows, out.shape, x.shape[1]
    assert x.stride(1) == 1 and w.num_inputs == K and expert_weights.is_contiguous() and out.is_contiguous()
    block_n, warps, stages = CONFIGS[block]
    asm = asm_for(w, x.dtype)
    x_sums = group_sums(x, w, block) if w.has_offsets else None
    _quantized_experts_kernel[(len(tile_experts), triton.cdiv(N, block_n))](
        x,
        w.words,
        w.high,
        w.scales,
        w.offsets,
        w.super_scales,
        x_sums,
        table_of(w, asm),
        biases,
        expert_weights,
        out,
        routes,
        tile_experts,
        num_routes,
        0 if x_sums is None else x_sums.stride(0),
        N,
        K,
        w.num_outputs,
        w.num_outputs // experts.num_experts,
        w.num_chunks,
        x.stride(0),
        routes_a_row,
        ACTIVATION=activation,
        BITS=w.bits,
        GROUP=w.group,
        WIDTH=w.width,
        ZERO=w.zero,
        TABLE=bool(w.table),
        ASM=asm,
        WHOLE_CHUNKS=K % w.chunk == 0,
        BLOCK_M=block,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=warps,
    )


@triton.jit(do_not_specialize=["num_routes"])
def _quantized_experts_kernel(
    x_ptr,
    words_ptr,
    high_ptr,
    scale_ptr,
    offset_ptr,
    super_scale_ptr,
    x_sum_ptr,
    table_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    route_ptr,
    tile_expert_ptr,
    num_routes,
    x_sum_stride,
    N,
    K,
    all_outputs,
    expert_outputs,
    chunks,
    x_stride,
    routes_a_row,
    ACTIVATION: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    expert = tl.load(tile_expert_ptr + tl.program_id(0))
    if expert >= 0:
        routes = tl.load(route_ptr + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        present = routes < num_routes
        rows = tl.where(present, routes // routes_a_row, 0)
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        first = expert.to(tl.int64) * expert_outputs + tl.minimum(outputs, N - 1)
        sums = _group_dot(
            x_ptr, words_ptr, high_ptr, scale_ptr, offset_ptr, super_scale_ptr, x_sum_ptr, table_ptr, rows, present, first,
            x_sum_stride, K, all_outputs, chunks, x_stride, BITS, GROUP, WIDTH, ZERO, TABLE, ASM, WHOLE_CHUNKS, BLOCK_M,
            BLOCK_N, STAGES,
        )  # fmt: skip
        biases = None
        if bias_ptr is not None:
            biases = bias_ptr + first
            sums += tl.load(biases)[:, None]
        if ACTIVATION >= 0:  # the rows of up stand N below those of gate
            up = _group_dot(
                x_ptr, words_ptr, high_ptr, scale_ptr, offset_ptr, super_scale_ptr, x_sum_ptr, table_ptr, rows, present,
                first + N, x_sum_stride, K, all_outputs, chunks, x_stride, BITS, GROUP, WIDTH, ZERO, TABLE, ASM,
                WHOLE_CHUNKS, BLOCK_M, BLOCK_N, STAGES,
            )  # fmt: skip
            if bias_ptr is not None:
                up += tl.load(biases + N)[:, None]
            sums = activate_times(sums, up, ACTIVATION)
        else:
            sums *= tl.load(weight_ptr + routes, mask=present, other=0.0)[None, :]
        places = routes.to(tl.int64)[None, :] * N + outputs[:, None]
        tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), mask=(outputs < N)[:, None] & present[None, :])


@triton.jit
def _group_dot(
    x_ptr,
    words_ptr,
    high_ptr,
    scale_ptr,
    offset_ptr,
    super_scale_ptr,
    x_sum_ptr,
    table_ptr,
    rows,  # [BLOCK_M] of x
    present,  # [BLOCK_M]
    outputs,  # [BLOCK_N] int64, among those of all experts
    x_sum_stride,
    K,
    all_outputs,
    chunks,
    x_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """-> [BLOCK_N, BLOCK_M] fp32"""
    PLANES: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = max(PLANES * WIDTH // GROUP, 1)  # a chunk
    RUN: tl.constexpr = PLANES * WIDTH // GROUPS  # inputs of a chunk that share a scale
    columns = tl.arange(0, WIDTH)
    x_rows = x_ptr + rows.to(tl.int64)[None, :] * x_stride
    like = tl.zeros((1,), x_ptr.dtype.element_ty)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        HAS_OFFSETS: tl.constexpr = x_sum_ptr is not None
        scales = load_scales(
            scale_ptr, offset_ptr, super_scale_ptr, chunk, outputs, all_outputs, GROUP, PLANES * WIDTH, HAS_OFFSETS
        )
        x_sums = ()
        if x_sum_ptr is not None:
            for number in tl.static_range(GROUPS):
                x_sums = append(x_sums, tl.load(x_sum_ptr + (chunk * GROUPS + number) * x_sum_stride + rows))
        places = (outputs * chunks + chunk)[:, None] * WIDTH + columns[None, :]
        high = None if high_ptr is None else tl.load(high_ptr + places)
        planes = unpack(tl.load(words_ptr + places), high, like, table_ptr, BITS, ZERO, TABLE, ASM)
        for number in tl.static_range(GROUPS):
            k = (chunk * GROUPS + number) * RUN + tl.arange(0, RUN)
            inside = present[None, :] if WHOLE_CHUNKS else present[None, :] & (k < K)[:, None]
            x = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
            w = take_planes(planes, number * PLANES // GROUPS, PLANES // GROUPS)
            sums += tl.dot(w, x, input_precision="ieee") * scale_of(scales, number)[:, None]
            if x_sum_ptr is not None:
                sums += offset_of(scales, number)[:, None] * x_sums[number][None, :]
    return sums
