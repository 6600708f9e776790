# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Mixture of experts (MoE) as two grouped GEMMs: out[t] = sum over j of weight[t, j] * expert(id[t, j])(x[t]).

A *route* is one (token, expert) pair: route t * k + j. Routes are sorted by expert into tiles of `block` routes, each
tile of one expert; the last tile of an expert is padded (sorting.py). Only the device knows how many tiles there are,
so as many programs start as there can be, and those without a tile return. A few routes are not sorted: each is a tile
of its own, since hardly two have the same expert. GEMMs are transposed as in `linear_stream`, so a tile of 16 routes
costs no more arithmetic than it must, and one token streams only the weights of its experts.

Two other ways are for plain experts of 16 bits. A few routes go through GEMV kernels (gemv.py), whose sums have another
order: not with `batch_invariant`. Prompts take large tiles (tiles.py), whose sums are those of the kernel here. So with
`batch_invariant` a route's sums do not depend on its tile, and results are the same in any batch.

Experts are floats, quantized in groups (quantized.py; many routes on Hopper in wide tiles whose sums have another
order, quantized_tiles.py, not with `batch_invariant`), or fp8 with scales; with fp8 experts the activations are fp8 as
well, as in linear/scaled.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.activation import activate_times
from quire.ops.gpu.linear.quantize_rows import quantize_rows
from quire.ops.gpu.linear.scaled import ScaledWeight
from quire.ops.gpu.moe.gathering import gathered_parts
from quire.ops.gpu.moe.gemv import can_gemv, gemv_mlp
from quire.ops.gpu.moe.mxfp4_config import mxfp4_tile
from quire.ops.gpu.moe.quantized import MAX_TILE_ROUTES, QuantizedExperts, quantized_expert_gemm
from quire.ops.gpu.moe.quantized_config import wide_tile
from quire.ops.gpu.moe.quantized_few import can_few, few_mlp
from quire.ops.gpu.moe.sorting import RoutedTokens, by_route, find_tile, sort_by_expert
from quire.ops.gpu.moe.tiles import TILE_ROUTES, can_tile, tile_gemm
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs
from quire.ops.gpu.pointwise import activate_elements
from quire.ops.opset import Activation

BLOCK_K = 128  # inputs a step where there are scales, and the side of a block of them
MAX_UNSORTED = 16  # routes
MIN_TILED_ROUTES = 48  # an expert's, on average: more are multiplied in large tiles (tiles.py)
TILES_A_GROUP = 8  # tiles that take the same weights one after the other, while the L2 cache holds them


@dataclass(frozen=True, slots=True, eq=False)
class ScaledExperts:
    q: Tensor  # [experts, outputs, inputs] float8_e4m3fn
    scales: Tensor  # fp32: [experts, outputs], or by blocks [experts, outputs / 128, inputs / 128]

    @property
    def num_experts(self) -> int:
        return len(self.q)

    @property
    def by_blocks(self) -> bool:
        return len(self.scales.shape) == 3

    @property
    def nbytes(self) -> int:
        return int(self.q.nbytes + self.scales.nbytes)


Experts: TypeAlias = Tensor | QuantizedExperts | ScaledExperts
Exchange: TypeAlias = Callable[[Tensor], Tensor]  # with other devices


def can_stack_scaled(parts: Sequence[ScaledWeight]) -> bool:
    """Blocks of scales have to end where the rows and columns of a part do."""
    if len({part.by_blocks for part in parts}) > 1:
        return False
    return not parts[0].by_blocks or not any(side % BLOCK_K for part in parts for side in part.q.shape)


def stack_scaled(parts: Sequence[ScaledWeight], num_experts: int) -> ScaledExperts:
    """Stack the parts, expert after expert."""
    q = torch.cat([part.q for part in parts]).unflatten(0, (num_experts, -1))
    return ScaledExperts(q, torch.cat([part.scales for part in parts]).unflatten(0, (num_experts, -1)))


# block (routes a tile): (outputs a program, inputs a step, warps, stages)
CONFIGS = {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (64, 64, 4, 4), 128: (128, 64, 8, 3)}


def moe_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Experts,
    down: Experts,
    activation: Activation = Activation.SILU,
    gate_up_biases: Tensor | None = None,
    down_biases: Tensor | None = None,
    gated: bool = True,
    all_hidden: Exchange | None = None,
    all_routes: Exchange | None = None,
    limit: float = 0.0,
    batch_invariant: bool = False,
    overlap: bool = False,
) -> Tensor:
    """x [T, H]; ids [T, k] int32 and weights [T, k] fp32; gate_up [E, 2 I, H], down [E, O, I], biases [E, 2 I] and
    [E, O] fp32 -> [T, O]. If experts are not `gated`, gate_up is [E, I, H], and its outputs are activated. `limit` is
    that of `Routing`.

    An id outside 0 .. E is an expert of another device: it adds nothing, unless `all_routes` [T * k, O] -> the same
    gets its part from there. `all_hidden` [T * k, I] -> [T * k, inputs of down] gets the columns of other devices."""
    T, k = expert_ids.shape
    E, num_outputs = _num_experts(down), _num_outputs(down)
    if T == 0:
        return x.new_empty(0, num_outputs)
    alone = gated and all_hidden is None and all_routes is None and not batch_invariant
    if alone and can_gemv(x, gate_up, down, T * k):
        given = x, expert_ids, expert_weights, gate_up, down, activation, gate_up_biases, down_biases
        return gemv_mlp(*given, limit, overlap)
    streamed = None if batch_invariant or not gated or all_hidden is not None else mxfp4_tile(x, gate_up, down, T * k)
    if alone and streamed is None and can_few(x, gate_up, down, T * k):
        assert isinstance(gate_up, QuantizedExperts) and isinstance(down, QuantizedExperts)
        return few_mlp(
            x, expert_ids, expert_weights, gate_up, down, activation, gate_up_biases, down_biases, limit, overlap
        )
    if gated and all_hidden is None and T * k > MIN_TILED_ROUTES * E and can_tile(x, gate_up, down):
        parts = _tiled_parts(
            x, expert_ids, expert_weights, gate_up, down, activation, gate_up_biases, down_biases, limit, overlap
        )
    elif streamed is not None:
        from quire.ops.gpu.moe.mxfp4_tiles import mxfp4_expert_gemm  # Gluon is not in every Triton

        assert isinstance(gate_up, QuantizedExperts) and isinstance(down, QuantizedExperts)
        given = x, expert_ids, expert_weights, gate_up, down, activation, gate_up_biases, down_biases
        parts = gathered_parts(mxfp4_expert_gemm, *given, streamed, limit, overlap)
    elif gated and all_hidden is None and not batch_invariant and (tile := wide_tile(x, gate_up, down, T * k)):
        from quire.ops.gpu.moe.quantized_tiles import wide_expert_gemm  # Gluon is not in every Triton

        assert isinstance(gate_up, QuantizedExperts) and isinstance(down, QuantizedExperts)
        given = x, expert_ids, expert_weights, gate_up, down, activation, gate_up_biases, down_biases
        parts = gathered_parts(wide_expert_gemm, *given, tile, limit, overlap)
    else:
        parts = _parts(
            x, expert_ids, expert_weights, gate_up, down, activation, gate_up_biases, down_biases, gated, all_hidden,
            limit, overlap,
        )  # fmt: skip
    if all_routes is not None:
        return _add_routes(all_routes(parts), torch.zeros_like(expert_ids), 1, overlap)
    return _add_routes(parts, expert_ids, E, overlap)


def _tiled_parts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    gate_up_biases: Tensor | None,
    down_biases: Tensor | None,
    limit: float,
    overlap: bool,
) -> Tensor:
    """-> [T * k, O], what each route adds."""
    k, E = expert_ids.shape[1], len(gate_up)
    routes, tile_experts, num_routes, _ = sort_by_expert(expert_ids, E, TILE_ROUTES, overlap)
    hidden = x.new_empty(len(routes), down.shape[2])
    parts = x.new_empty(num_routes, down.shape[1])
    tiles = routes, tile_experts, num_routes
    tile_gemm(x, gate_up, gate_up_biases, expert_weights, hidden, *tiles, k, int(activation), limit, overlap)
    tile_gemm(hidden, down, down_biases, expert_weights, parts, *tiles, 1, overlap=overlap)
    return parts


def _parts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Experts,
    down: Experts,
    activation: Activation,
    gate_up_biases: Tensor | None,
    down_biases: Tensor | None,
    gated: bool,
    all_hidden: Exchange | None,
    limit: float,
    overlap: bool,
) -> Tensor:
    """-> [T * k, O], what each route adds."""
    (num_tokens, k), E = expert_ids.shape, _num_experts(down)
    num_routes = num_tokens * k
    quantized = isinstance(gate_up, QuantizedExperts) or isinstance(down, QuantizedExperts)
    block = tile_block(num_routes, E, MAX_TILE_ROUTES) if quantized else tile_block(num_routes * 4 // 3, E)
    routed = by_route(expert_ids) if num_routes <= MAX_UNSORTED else sort_by_expert(expert_ids, E, block, overlap)
    hidden = x.new_empty(num_routes, _num_outputs(gate_up) // (2 if gated else 1))
    if gated:
        given = x, gate_up, gate_up_biases, expert_weights, hidden, routed
        _launch(*given, routes_a_row=k, activation=int(activation), limit=limit, overlap=overlap)
    else:
        ones = torch.ones_like(expert_weights)
        _launch(x, gate_up, gate_up_biases, ones, hidden, routed, routes_a_row=k, activation=-1, overlap=overlap)
        hidden = activate_elements(hidden, activation)
    hidden = hidden if all_hidden is None else all_hidden(hidden)
    parts = x.new_empty(num_routes, _num_outputs(down))
    _launch(hidden, down, down_biases, expert_weights, parts, routed, routes_a_row=1, activation=-1, overlap=overlap)
    return parts


def _num_experts(experts: Experts) -> int:
    return len(experts) if isinstance(experts, Tensor) else experts.num_experts


def _num_outputs(experts: Experts) -> int:
    """The outputs of one expert."""
    if isinstance(experts, QuantizedExperts):
        return experts.rows.num_outputs // experts.num_experts
    return int((experts.q if isinstance(experts, ScaledExperts) else experts).shape[1])


def tile_block(num_routes: int, num_experts: int, max_block: int = 128) -> int:
    """The smallest tile that holds an expert's routes when they are spread evenly. Experts of 16 bits ask for a third
    more: where many have a second tile, it reads their weights again."""
    return next(block for block in CONFIGS if block * num_experts >= num_routes or block == max_block)


def _launch(
    x: Tensor,
    experts: Experts,
    biases: Tensor | None,
    expert_weights: Tensor,
    out: Tensor,
    routed: RoutedTokens,
    routes_a_row: int,
    activation: int,
    limit: float = 0.0,
    overlap: bool = False,
) -> None:
    """out[route] = x[route // routes_a_row] @ w[expert].T: with an activation, of gate and up rows; without one, times
    the route's weight."""
    if isinstance(experts, QuantizedExperts):
        tiles = (routed.routes, routed.tile_experts, routed.block)
        quantized_expert_gemm(x, experts, biases, expert_weights, out, *tiles, routes_a_row, activation, limit)
        return
    block_n, block_k, warps, stages = CONFIGS[routed.block]
    N, K = out.shape[1], x.shape[1]
    if isinstance(experts, ScaledExperts):
        w, w_scales, block_k = experts.q, experts.scales, BLOCK_K
        x, x_scales = quantize_rows(x, w.dtype, BLOCK_K if experts.by_blocks else 0)
    else:
        w, w_scales, x_scales = experts, None, None
    if w.element_size() == 4:  # fp32, for comparisons: no tensor cores, and shared memory is soon full
        block_n, block_k, stages = 32, 32, 2
    elif activation >= 0:
        block_n = 64  # twice: gate and up
    assert x.stride(1) == 1 and w.is_contiguous() and expert_weights.is_contiguous()
    num_tiles = len(routed.tile_experts)
    _moe_kernel[(num_tiles * triton.cdiv(N, block_n),)](
        x,
        x_scales,
        w,
        w_scales,
        biases,
        expert_weights,
        out,
        routed.routes,
        routed.tile_experts,
        num_tiles,
        routed.num_routes,
        len(w),
        N,
        K,
        x.stride(0),
        w.stride(0),
        routes_a_row,
        ACTIVATION=activation,
        LIMIT=limit,
        BY_BLOCKS=w_scales is not None and len(w_scales.shape) == 3,
        WHOLE_CHUNKS=K % block_k == 0,
        BLOCK_M=routed.block,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        TILES_A_GROUP=TILES_A_GROUP,
        OVERLAP=overlap,
        num_warps=warps,
        **overlap_options(overlap),
    )


@triton.jit(do_not_specialize=["num_tiles", "num_routes", "num_experts"])
def _moe_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    route_ptr,
    tile_expert_ptr,
    num_tiles,
    num_routes,
    num_experts,
    N,
    K,
    x_stride,
    expert_stride,
    routes_a_row,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TILES_A_GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    tile, column = find_tile(tl.program_id(0), num_tiles, tl.cdiv(N, BLOCK_N), TILES_A_GROUP)
    expert = tl.load(tile_expert_ptr + tile)
    if (expert >= 0) & (expert < num_experts):
        routes = tl.load(route_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        present = routes < num_routes
        rows = (routes // routes_a_row).to(tl.int64)
        first = column * BLOCK_N
        outputs = first + tl.arange(0, BLOCK_N)
        mine = tl.minimum(outputs, N - 1)  # outputs past the end are computed and never stored
        up = N if ACTIVATION >= 0 else 0  # the rows of up are so far after those of gate
        w_rows = w_ptr + expert.to(tl.int64) * expert_stride + mine.to(tl.int64)[:, None] * K
        up_rows = w_rows + tl.cast(up, tl.int64) * K
        x_rows = x_ptr + rows[None, :] * x_stride
        chunks = tl.cdiv(K, BLOCK_K)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up_acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for chunk in tl.range(0, chunks, num_stages=STAGES):
            k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
            x_inside = present[None, :] if WHOLE_CHUNKS else present[None, :] & (k < K)[:, None]
            x = tl.load(x_rows + k[:, None], mask=x_inside, other=0.0)
            scales, up_scales = None, None
            if BY_BLOCKS:
                block = (expert * (N + up) + first) // BLOCK_K
                x_scales = tl.load(x_scale_ptr + rows * chunks + chunk, mask=present, other=0.0)[None, :]
                scales = x_scales * tl.load(w_scale_ptr + block * chunks + chunk)
                up_scales = x_scales * tl.load(w_scale_ptr + (block + up // BLOCK_K) * chunks + chunk)
            acc = _add_dot(acc, _load(w_rows + k[None, :], k, K, WHOLE_CHUNKS), x, scales, BY_BLOCKS)
            if ACTIVATION >= 0:
                w_up = _load(up_rows + k[None, :], k, K, WHOLE_CHUNKS)
                up_acc = _add_dot(up_acc, w_up, x, up_scales, BY_BLOCKS)
        if w_scale_ptr is not None and not BY_BLOCKS:
            w_scales = w_scale_ptr + expert * (N + up) + mine
            x_scales = tl.load(x_scale_ptr + rows, mask=present, other=0.0)[None, :]
            acc *= tl.load(w_scales)[:, None] * x_scales
            up_acc *= tl.load(w_scales + up)[:, None] * x_scales
        if bias_ptr is not None:
            biases = bias_ptr + expert * (N + up) + mine
            acc += tl.load(biases)[:, None]
            up_acc += tl.load(biases + up)[:, None]
        if ACTIVATION >= 0:
            acc = activate_times(acc, up_acc, ACTIVATION, LIMIT)
        else:
            acc *= tl.load(weight_ptr + routes, mask=present, other=0.0)[None, :]
        offsets = routes.to(tl.int64)[None, :] * N + outputs[:, None]
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=(outputs < N)[:, None] & present[None, :])


@triton.jit
def _add_dot(acc, w, x, scales, BY_BLOCKS: tl.constexpr):
    if BY_BLOCKS:
        acc += tl.dot(w, x) * scales
    elif w.dtype.is_fp8():  # tensor cores accumulate it with some 14 bits
        acc += tl.dot(w, x)
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _load(offsets, k, K, WHOLE_CHUNKS: tl.constexpr):
    return tl.load(offsets) if WHOLE_CHUNKS else tl.load(offsets, mask=(k < K)[None, :], other=0.0)


def _add_routes(parts: Tensor, expert_ids: Tensor, num_experts: int, overlap: bool) -> Tensor:
    """parts [T * k, H] -> [T, H]: the parts of each token, added in the order of its ids"""
    (T, k), H = expert_ids.shape, parts.shape[1]
    out = parts.new_empty(T, H)
    given, options = (parts, expert_ids.contiguous(), out, H, num_experts, k), overlap_options(overlap)
    _add_kernel[(T, triton.cdiv(H, 1024))](*given, BLOCK=1024, OVERLAP=overlap, **options)
    return out


@triton.jit
def _add_kernel(part_ptr, id_ptr, out_ptr, H, num_experts, k, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(k):
        id = tl.load(id_ptr + token * k + j)
        here = (id >= 0) & (id < num_experts)
        part = tl.load(part_ptr + (token * k + j) * H + columns, mask=here & (columns < H), other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)
