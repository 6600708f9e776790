# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Grouped GEMMs of experts quantized to 4 to 8 bits in groups: routes and tiles as in moe.py, weights as in
linear/grouped.py. The rows of all experts are one matrix, so those of expert e begin at row e * outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.activation import activate_times
from quire.ops.gpu.linear.e2m1 import E2M1, stack_words
from quire.ops.gpu.linear.exponents import by_group
from quire.ops.gpu.linear.grouped import group_sums
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.grouped_scales import append, load_scales, offset_of, scale_of, zeros_of
from quire.ops.gpu.linear.unpack import asm_for, kernel_args, kernel_constants, take_planes, unpack, word_places

MAX_TILE_ROUTES = 64
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
    """Whether they differ in nothing but outputs and tensors, and in whether their scales are exponents."""
    kinds = {
        (w.bits, w.group, w.width, w.zero, w.has_zero_points, w.has_offsets, w.codebook, *_dtypes(w)) for w in parts
    }
    return len(kinds) == 1


def _tensors(weight: GroupedWeight) -> tuple[Tensor | None, ...]:
    return weight.scales, weight.offsets, weight.super_scales, weight.high


def _dtypes(weight: GroupedWeight) -> tuple[torch.dtype | None, ...]:
    """Those of the tensors; exponents can become fp32."""
    scales, *others = (None if tensor is None else tensor.dtype for tensor in _tensors(weight))
    return torch.float32 if weight.has_exponents else scales, *others


def _with_float_scales(weight: GroupedWeight) -> GroupedWeight:
    return replace(weight, scales=by_group(weight.scales)) if weight.has_exponents else weight


def stack_experts(parts: Sequence[GroupedWeight], num_experts: int) -> QuantizedExperts:
    """Stack parts that `can_stack`, expert after expert. Where scales of some are floats, those of all become so."""
    if not all(part.has_exponents for part in parts):
        parts = [_with_float_scales(part) for part in parts]
    scales, offsets, super_scales, high = zip(*map(_tensors, parts), strict=True)
    rows = replace(
        parts[0],
        num_outputs=sum(part.num_outputs for part in parts),
        words=_stack_words(parts),
        scales=torch.cat(scales, dim=1),
        offsets=_concatenate(offsets, dim=1),
        super_scales=_concatenate(super_scales, dim=1),
        high=_concatenate(high, dim=0),
    )
    return QuantizedExperts(num_experts, rows)


def _stack_words(parts: Sequence[GroupedWeight]) -> Tensor:
    words = [part.words for part in parts]
    return stack_words(words, [part.num_outputs for part in parts]) if parts[0].codebook == E2M1 else torch.cat(words)


def _concatenate(parts: Sequence[Tensor | None], dim: int) -> Tensor | None:
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
    limit: float = 0.0,
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
        kernel_args(w, asm),
        x_sums,
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
        LIMIT=limit,
        WHOLE_CHUNKS=K % w.chunk == 0,
        BLOCK_M=block,
        BLOCK_N=block_n,
        STAGES=stages,
        num_warps=warps,
        **kernel_constants(w, asm),
    )


@triton.jit(do_not_specialize=["num_routes"])
def _quantized_experts_kernel(
    x_ptr,
    weight,  # GroupedArgs, of all experts
    x_sum_ptr,
    bias_ptr,
    expert_weight_ptr,
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
    LIMIT: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    ASM: tl.constexpr,
):
    expert = tl.load(tile_expert_ptr + tl.program_id(0))
    if (expert >= 0) & (expert < all_outputs // expert_outputs):
        routes = tl.load(route_ptr + tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))
        present = routes < num_routes
        rows = tl.where(present, routes // routes_a_row, 0)
        x = (x_ptr, x_stride, x_sum_ptr, x_sum_stride, rows, present)
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        first = expert.to(tl.int64) * expert_outputs + tl.minimum(outputs, N - 1)
        acc = _gemm(
            x, weight, first, K, all_outputs, chunks, BITS, GROUP, WIDTH, ZERO, CODEBOOK, ASM, WHOLE_CHUNKS, BLOCK_M,
            BLOCK_N, STAGES,
        )  # fmt: skip
        biases = None
        if bias_ptr is not None:
            biases = bias_ptr + first
            acc += tl.load(biases)[:, None]
        if ACTIVATION >= 0:  # the rows of up are N after those of gate
            up = _gemm(
                x, weight, first + N, K, all_outputs, chunks, BITS, GROUP, WIDTH, ZERO, CODEBOOK, ASM, WHOLE_CHUNKS,
                BLOCK_M, BLOCK_N, STAGES,
            )  # fmt: skip
            if bias_ptr is not None:
                up += tl.load(biases + N)[:, None]
            acc = activate_times(acc, up, ACTIVATION, LIMIT)
        else:
            acc *= tl.load(expert_weight_ptr + routes, mask=present, other=0.0)[None, :]
        offsets = routes.to(tl.int64)[None, :] * N + outputs[:, None]
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=(outputs < N)[:, None] & present[None, :])


@triton.jit
def _gemm(
    x,  # pointer, stride, sums of groups, their stride, rows [BLOCK_M], which of the rows are present [BLOCK_M]
    weight,  # GroupedArgs
    outputs,  # [BLOCK_N] int64, among those of all experts
    K,
    all_outputs,
    chunks,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    ASM: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """-> [BLOCK_N, BLOCK_M] fp32"""
    x_ptr, x_stride, x_sum_ptr, x_sum_stride, rows, present = x
    PLANES: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = max(PLANES * WIDTH // GROUP, 1)  # a chunk
    RUN: tl.constexpr = PLANES * WIDTH // GROUPS  # inputs of a chunk that share a scale
    HAS_OFFSETS: tl.constexpr = x_sum_ptr is not None
    columns = tl.arange(0, WIDTH)
    x_rows = x_ptr + rows.to(tl.int64)[None, :] * x_stride
    like = tl.zeros((1,), x_ptr.dtype.element_ty)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        scales = load_scales(weight, chunk, outputs, all_outputs, GROUP, PLANES * WIDTH, HAS_OFFSETS or ZERO < 0)
        zeros = zeros_of(scales, GROUPS, ZERO)
        x_sums = ()
        if x_sum_ptr is not None:
            for number in tl.static_range(GROUPS):
                x_sums = append(x_sums, tl.load(x_sum_ptr + (chunk * GROUPS + number) * x_sum_stride + rows))
        offsets = word_places(outputs, chunk, chunks, columns, WIDTH, CODEBOOK)
        high = None if weight.high is None else tl.load(weight.high + offsets)
        planes = unpack(tl.load(weight.words + offsets), high, zeros, like, weight.codebook, BITS, ZERO, CODEBOOK, ASM)
        for number in tl.static_range(GROUPS):
            k = (chunk * GROUPS + number) * RUN + tl.arange(0, RUN)
            inside = present[None, :] if WHOLE_CHUNKS else present[None, :] & (k < K)[:, None]
            tile = tl.load(x_rows + k[:, None], mask=inside, other=0.0)
            w = take_planes(planes, number * PLANES // GROUPS, PLANES // GROUPS)
            acc += tl.dot(w, tile, input_precision="ieee") * scale_of(scales, number)[:, None]
            if x_sum_ptr is not None:
                acc += offset_of(scales, number)[:, None] * x_sums[number][None, :]
    return acc
