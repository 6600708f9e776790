# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Experts quantized in groups for few tokens: when, with which tiles, and the kernels of one MLP (few_kernel.py)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.gpu.linear.wide_format import scale_words
from quire.ops.gpu.moe.few_formats import constants_of, few_format
from quire.ops.gpu.moe.quantized import QuantizedExperts
from quire.ops.gpu.moe.sorting import sort_by_expert
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs
from quire.ops.opset import Activation

MAX_FEW_ROUTES = 8  # an expert's, on average
MAX_NARROW_ROUTES = 6  # the same, in tiles of 8 routes
MIN_SPLIT_CHUNKS = 16  # of a row of down: fewer are not shared among programs
MAX_SHARED = 200_000  # bytes of a program's activations
SUM_BLOCK = 512


class FewRoutesConfig(NamedTuple):
    columns: int  # routes a tile: 8 or 16
    warps: int  # that have rows of their own, 32 each
    depth: int  # chunks whose words are in flight
    parts: int = 1  # of the inputs: each has `warps` warps
    splits: int = 1  # programs that share the inputs of a tile
    registers: int = 0  # of a thread, at most; 0: the compiler's choice


def can_few(x: Tensor, gate_up: object, down: object, num_routes: int) -> bool:
    """Whether the kernel knows the experts, and the routes are few."""
    if not isinstance(gate_up, QuantizedExperts) or not isinstance(down, QuantizedExperts):
        return False
    if num_routes > MAX_FEW_ROUTES * down.num_experts or x.dtype != torch.bfloat16 or not has_wide_kernel(x.device):
        return False
    return x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0 and all(_fits(experts) for experts in (gate_up, down))


def _fits(experts: QuantizedExperts) -> bool:
    inputs = experts.rows.num_chunks * experts.rows.chunk
    small = inputs * 2 * 16 <= MAX_SHARED and experts.rows.num_inputs % 16 == 0
    return small and few_format(experts.rows) is not None


def few_configs(
    gate_up: QuantizedExperts, down: QuantizedExperts, num_routes: int
) -> tuple[FewRoutesConfig, FewRoutesConfig]:
    columns = 8 if num_routes <= MAX_NARROW_ROUTES * down.num_experts else 16
    alone = num_routes <= _max_unsorted(down.num_experts)
    first, second = (_config(experts, columns, alone) for experts in (gate_up, down))
    if down.rows.num_chunks < MIN_SPLIT_CHUNKS or columns == 16:
        return first, second
    if not down.rows.has_exponents:
        return first, second._replace(splits=2)
    return first, second._replace(splits=4, parts=2) if alone else second


def _config(experts: QuantizedExperts, columns: int, alone: bool) -> FewRoutesConfig:
    """A route that is alone leaves multiprocessors idle, unless its inputs are shared among warps. Scales that are
    computed take registers."""
    warps, parts = (1, 4) if alone else (4, 1)
    if experts.rows.has_exponents:
        depth, registers = _depth_of_mxfp4(columns, alone, experts.rows.width)
    else:
        few_scales = experts.rows.super_scales is None and not experts.rows.has_offsets
        depth, registers = 1, 128 if few_scales else 168
    return FewRoutesConfig(columns, warps, depth, parts, registers=registers)


def _depth_of_mxfp4(columns: int, alone: bool, width: int) -> tuple[int, int]:
    """And registers. With 80 of a thread, all programs of four routes are on the device at once. The planes of a chunk
    of 256 inputs take twice as many as those of 128."""
    if width == 32:
        return 1, 128 if alone else 144
    if alone:
        return 1, 80
    return (3 if columns == 8 else 2), 128


def _max_unsorted(num_experts: int) -> int:
    """Routes, most of them to experts of their own."""
    return max(8, num_experts // 8)


def few_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: QuantizedExperts,
    down: QuantizedExperts,
    activation: Activation,
    gate_up_biases: Tensor | None,
    down_biases: Tensor | None,
    limit: float = 0.0,
    overlap: bool = False,
    configs: tuple[FewRoutesConfig, FewRoutesConfig] | None = None,
) -> Tensor:
    """`moe_mlp` of gated experts."""
    (T, k), E = expert_ids.shape, down.num_experts
    inner, num_outputs = gate_up.rows.num_outputs // E // 2, down.rows.num_outputs // E
    assert x.shape == (T, gate_up.rows.num_inputs)
    expert_ids, expert_weights = expert_ids.contiguous(), expert_weights.contiguous()
    first, second = configs or few_configs(gate_up, down, T * k)
    assert first.columns == second.columns
    routes, tile_experts = None, expert_ids.flatten()
    if T * k > _max_unsorted(E):
        routes, tile_experts, _, _ = sort_by_expert(expert_ids, E, first.columns, overlap)
    tiles = routes, tile_experts, T * k
    hidden, out = x.new_empty(T * k, inner), x.new_empty(T, num_outputs)
    parts = x.new_empty(second.splits, T * k, num_outputs, dtype=torch.float32)
    kind = int(activation)
    few_gemm(x, gate_up, gate_up_biases, expert_weights, hidden, *tiles, k, kind, first, limit, overlap)
    few_gemm(hidden, down, down_biases, expert_weights, parts, *tiles, 1, -1, second, 0.0, overlap, True)
    _sum_kernel[(T, triton.cdiv(num_outputs, SUM_BLOCK))](
        parts,
        expert_ids,
        out,
        num_outputs,
        T * k,
        E,
        TOP_K=k,
        SPLITS=second.splits,
        BLOCK=SUM_BLOCK,
        OVERLAP=overlap,
        **overlap_options(overlap),
    )
    return out


def few_gemm(
    x: Tensor,
    experts: QuantizedExperts,
    biases: Tensor | None,
    expert_weights: Tensor,
    out: Tensor,
    routes: Tensor | None,
    tile_experts: Tensor,
    num_routes: int,
    routes_a_row: int,
    activation: int,
    config: FewRoutesConfig,
    limit: float = 0.0,
    overlap: bool = False,
    ids_are_known: bool = False,
) -> None:
    """out[route] = x[route // routes_a_row] @ w[expert].T, as `quantized_expert_gemm`; out [routes, N], or with splits
    [splits, routes, N], to be added up. Without `routes` each route is a tile of its own. `ids_are_known`: the kernel
    before this one waited for routes and experts, so weights are loaded before it ends."""
    from quire.ops.gpu.moe.few_kernel import few_kernel  # Gluon is not in every Triton

    w, N, K = experts.rows, out.shape[-1], x.shape[1]
    form = few_format(w)
    assert form is not None and x.dtype == torch.bfloat16 and x.stride(1) == 1 and w.num_inputs == K
    assert x.stride(0) % 8 == 0 and K % 16 == 0 and out.is_contiguous() and expert_weights.is_contiguous()
    assert config.splits == 1 or activation < 0
    rows = 16 * config.warps * (1 if activation >= 0 else 2)
    share = triton.cdiv(w.num_chunks, config.splits * config.parts)
    few_kernel[(triton.cdiv(N, rows), tile_experts.numel(), config.splits)](
        x,
        w.words,
        w.high,
        scale_words(w),
        w.offsets,
        w.super_scales,
        biases,
        expert_weights,
        out,
        routes,
        tile_experts,
        num_routes,
        experts.num_experts,
        N,
        K,
        w.num_chunks,
        x.stride(0),
        routes_a_row,
        w.num_outputs,
        ACTIVATION=activation,
        LIMIT=limit,
        SPLITS=config.splits,
        SHARE=share,
        COLUMNS=config.columns,
        DEPTH=min(config.depth, share),
        ONCE=config.depth >= share,
        PARTS=config.parts,
        WARPS=config.warps,
        IDS_ARE_KNOWN=ids_are_known,
        OVERLAP=overlap,
        num_warps=config.warps * config.parts,
        **constants_of(w, form),
        **overlap_options(overlap),
        **({"maxnreg": config.registers} if config.registers else {}),
    )


@triton.jit(do_not_specialize=["num_routes"])
def _sum_kernel(
    part_ptr,
    id_ptr,
    out_ptr,
    N,
    num_routes,
    num_experts,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[token] = the sum of its routes' parts [splits, routes, N], in the order of its ids"""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        expert = tl.load(id_ptr + token * TOP_K + j)
        here = (expert >= 0) & (expert < num_experts) & (columns < N)
        for split in tl.static_range(SPLITS):
            total += tl.load(part_ptr + (split * num_routes + token * TOP_K + j) * N + columns, mask=here, other=0.0)
    tl.store(out_ptr + token * N + columns, total.to(out_ptr.dtype.element_ty), mask=columns < N)
