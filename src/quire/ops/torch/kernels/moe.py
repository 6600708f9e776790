# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""A mixture of experts as two grouped products: out[t] = sum over j of weight[t, j] * expert(id[t, j])(x[t]).

A *route* is one token's way through one expert: route t * k + j. Routes are sorted by expert into tiles of `block`
routes, each tile of one expert; the last tile of an expert is padded. How many tiles there are is known on the device
only, so as many programs start as there can be at most, and those without a tile return. Products are turned around as
in `linear_stream`, so a tile of 16 routes costs no more arithmetic than it must and one token streams only the weights
of its experts. A route's sums do not depend on its tile: results are the same in any batch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.opset import Activation
from quire.ops.torch.kernels.activation import activate_times
from quire.ops.torch.kernels.moe_codes import MOST_ROUTES, CodedExperts, coded_products

SORT_BLOCK = 1024  # routes at a time
TILES_A_GROUP = 8  # tiles that take the same weights one after the other, while the cache holds them


class Routing(NamedTuple):
    routes: Tensor  # [tiles * block] int32: the route at each place, or num_routes where there is none
    tile_experts: Tensor  # [tiles] int32: -1 for tiles that are not needed
    num_routes: int
    block: int


# block (routes a tile): (outputs a program, inputs a step, warps, stages)
CONFIGS = {16: (64, 128, 4, 4), 32: (64, 128, 4, 4), 64: (64, 64, 4, 4), 128: (128, 64, 8, 3)}


def mixture(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor | CodedExperts,
    down: Tensor | CodedExperts,
    activation: Activation = Activation.SILU,
    gate_up_biases: Tensor | None = None,
    down_biases: Tensor | None = None,
) -> Tensor:
    """x [T, H]; ids [T, k] int32 and weights [T, k] fp32; gate_up [E, 2 I, H], down [E, H, I], biases [E, 2 I] and
    [E, H] fp32 -> [T, H].

    An id outside 0 .. E is an expert that lives elsewhere: it adds nothing."""
    T, k = expert_ids.shape
    if T == 0:
        return torch.empty_like(x)
    coded = isinstance(gate_up, CodedExperts) or isinstance(down, CodedExperts)
    E, inner = (down.num_experts, down.rows.num_inputs) if isinstance(down, CodedExperts) else down.shape[::2]
    routing = sort_by_expert(expert_ids, E, tile_block(T * k, E, MOST_ROUTES if coded else 128))
    hidden = x.new_empty(T * k, inner)
    _launch(x, gate_up, gate_up_biases, expert_weights, hidden, routing, routes_a_row=k, activation=int(activation))
    parts = x.new_empty(T * k, x.shape[1])
    _launch(hidden, down, down_biases, expert_weights, parts, routing, routes_a_row=1, activation=-1)
    return _add_routes(parts, expert_ids, E)


def tile_block(num_routes: int, num_experts: int, most: int = 128) -> int:
    """The smallest tile that holds an expert's routes when they are spread evenly."""
    return next(block for block in CONFIGS if block * num_experts >= num_routes or block == most)


def sort_by_expert(expert_ids: Tensor, num_experts: int, block: int) -> Routing:
    num_routes = expert_ids.numel()
    num_tiles = -(-num_routes // block) + min(num_experts, num_routes)  # at most
    routes = torch.empty(num_tiles * block, dtype=torch.int32, device=expert_ids.device)
    tile_experts = torch.empty(num_tiles, dtype=torch.int32, device=expert_ids.device)
    _sort_kernel[(num_experts + 1,)](
        expert_ids.contiguous(),
        routes,
        tile_experts,
        num_routes,
        num_tiles,
        num_experts,
        TILE=block,
        BINS=triton.next_power_of_2(num_experts + 1),
        BLOCK=min(SORT_BLOCK, max(int(triton.next_power_of_2(num_routes)), 16)),
    )
    return Routing(routes, tile_experts, num_routes, block)


@triton.jit(do_not_specialize=["num_routes", "num_tiles"])
def _sort_kernel(
    id_ptr,
    route_ptr,
    tile_expert_ptr,
    num_routes,
    num_tiles,
    num_experts,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program e places the routes of expert e, behind the tiles of those before it; the last one ends the list."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, num_routes, BLOCK):
        route = first + tl.arange(0, BLOCK)
        ids = tl.load(id_ptr + route, mask=route < num_routes, other=-1)
        ids = tl.where((ids >= 0) & (ids < num_experts), ids, num_experts)  # nobody's routes have a bin of their own
        counts += tl.histogram(ids.to(tl.int32), BINS)
    tiles = tl.where(bins < num_experts, (counts + TILE - 1) // TILE, 0)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)

    if expert == num_experts:
        for first in range(first_tile, num_tiles, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            tl.store(tile_expert_ptr + tile, -1, mask=tile < num_tiles)
    else:
        count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
        last_tile = first_tile + (count + TILE - 1) // TILE
        for first in range(first_tile, last_tile, BLOCK):
            tile = first + tl.arange(0, BLOCK)
            tl.store(tile_expert_ptr + tile, expert, mask=tile < last_tile)
        place = first_tile * TILE
        for first in range(0, num_routes, BLOCK):
            route = first + tl.arange(0, BLOCK)
            mine = tl.load(id_ptr + route, mask=route < num_routes, other=-1) == expert
            rank = tl.cumsum(mine.to(tl.int32), axis=0)
            tl.store(route_ptr + place + rank - 1, route, mask=mine)
            place += tl.sum(mine.to(tl.int32), axis=0)
        padding = place + tl.arange(0, TILE)
        tl.store(route_ptr + padding, num_routes, mask=padding < last_tile * TILE)


def _launch(
    x: Tensor,
    w: Tensor | CodedExperts,
    biases: Tensor | None,
    expert_weights: Tensor,
    out: Tensor,
    routing: Routing,
    routes_a_row: int,
    activation: int,
) -> None:
    """out[route] = x[route // routes_a_row] @ w[expert].T: with an activation, of gate and up rows; without one, times
    the route's weight."""
    if isinstance(w, CodedExperts):
        tiles = (routing.routes, routing.tile_experts, routing.block)
        coded_products(x, w, biases, expert_weights, out, *tiles, routes_a_row, activation)
        return
    N, K = out.shape[1], x.shape[1]
    assert x.stride(1) == 1 and w.is_contiguous() and expert_weights.is_contiguous()
    block_n, block_k, warps, stages = CONFIGS[routing.block]
    if w.element_size() == 4:  # for comparisons: multiplied one by one, and shared memory is soon full
        block_n, block_k, stages = 32, 32, 2
    elif activation >= 0:
        block_n = 64  # twice: gate and up
    num_tiles = len(routing.tile_experts)
    _mixture_kernel[(num_tiles * triton.cdiv(N, block_n),)](
        x,
        w,
        biases,
        expert_weights,
        out,
        routing.routes,
        routing.tile_experts,
        num_tiles,
        routing.num_routes,
        N,
        K,
        x.stride(0),
        w.stride(0),
        routes_a_row,
        ACTIVATION=activation,
        WHOLE_CHUNKS=K % block_k == 0,
        BLOCK_M=routing.block,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages,
        TILES_A_GROUP=TILES_A_GROUP,
        num_warps=warps,
    )


@triton.jit(do_not_specialize=["num_tiles", "num_routes"])
def _mixture_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    weight_ptr,
    out_ptr,
    route_ptr,
    tile_expert_ptr,
    num_tiles,
    num_routes,
    N,
    K,
    x_stride,
    expert_stride,
    routes_a_row,
    ACTIVATION: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    TILES_A_GROUP: tl.constexpr,
):
    columns = tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (TILES_A_GROUP * columns)
    tiles = tl.minimum(num_tiles - group * TILES_A_GROUP, TILES_A_GROUP)
    inside_group = tl.program_id(0) % (TILES_A_GROUP * columns)
    tile = group * TILES_A_GROUP + inside_group % tiles
    expert = tl.load(tile_expert_ptr + tile)
    if expert >= 0:
        routes = tl.load(route_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        present = routes < num_routes
        outputs = inside_group // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        w_rows = w_ptr + expert.to(tl.int64) * expert_stride + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * K
        up_rows = w_rows + N.to(tl.int64) * K  # the rows of up stand N below those of gate
        x_rows = x_ptr + (routes // routes_a_row).to(tl.int64)[None, :] * x_stride
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for chunk in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
            k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
            x_inside = present[None, :] if WHOLE_CHUNKS else present[None, :] & (k < K)[:, None]
            x = tl.load(x_rows + k[:, None], mask=x_inside, other=0.0)
            sums = tl.dot(_load(w_rows + k[None, :], k, K, WHOLE_CHUNKS), x, sums, input_precision="ieee")
            if ACTIVATION >= 0:
                up_sums = tl.dot(_load(up_rows + k[None, :], k, K, WHOLE_CHUNKS), x, up_sums, input_precision="ieee")
        if bias_ptr is not None:
            biases = bias_ptr + expert * (2 * N if ACTIVATION >= 0 else N) + tl.minimum(outputs, N - 1)
            sums += tl.load(biases)[:, None]
            if ACTIVATION >= 0:
                up_sums += tl.load(biases + N)[:, None]
        if ACTIVATION >= 0:
            sums = activate_times(sums, up_sums, ACTIVATION)
        else:
            sums *= tl.load(weight_ptr + routes, mask=present, other=0.0)[None, :]
        places = routes.to(tl.int64)[None, :] * N + outputs[:, None]
        tl.store(out_ptr + places, sums.to(out_ptr.dtype.element_ty), mask=(outputs < N)[:, None] & present[None, :])


@triton.jit
def _load(places, k, K, WHOLE_CHUNKS: tl.constexpr):
    return tl.load(places) if WHOLE_CHUNKS else tl.load(places, mask=(k < K)[None, :], other=0.0)


def _add_routes(parts: Tensor, expert_ids: Tensor, num_experts: int) -> Tensor:
    """parts [T * k, H] -> [T, H], those of each token added in the order of its ids"""
    (T, k), H = expert_ids.shape, parts.shape[1]
    out = parts.new_empty(T, H)
    _add_kernel[(T, triton.cdiv(H, 1024))](parts, expert_ids.contiguous(), out, H, num_experts, k, BLOCK=1024)
    return out


@triton.jit
def _add_kernel(part_ptr, id_ptr, out_ptr, H, num_experts, k, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(k):
        id = tl.load(id_ptr + token * k + j)
        here = (id >= 0) & (id < num_experts)
        part = tl.load(part_ptr + (token * k + j) * H + columns, mask=here & (columns < H), other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + token * H + columns, total.to(out_ptr.dtype.element_ty), mask=columns < H)
