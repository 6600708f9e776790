# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""An MLP of experts by grouped GEMMs whose tiles of rows are copied by the TMA unit: rows are gathered in the order of
the tiles first."""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.moe.mxfp4_config import MXFP4Tile
from quire.ops.gpu.moe.quantized import QuantizedExperts
from quire.ops.gpu.moe.quantized_config import WideTile
from quire.ops.gpu.moe.sorting import RoutedTokens, sort_by_expert
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs
from quire.ops.opset import Activation

GATHERED = 8  # rows a program


def gathered_parts(
    gemm: Callable[..., None],
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: QuantizedExperts,
    down: QuantizedExperts,
    activation: Activation,
    gate_up_biases: Tensor | None,
    down_biases: Tensor | None,
    tile: MXFP4Tile | WideTile,
    limit: float = 0.0,
    overlap: bool = False,
) -> Tensor:
    """-> [T * k, O], what each route adds. `gemm`: `mxfp4_expert_gemm` or `wide_expert_gemm`."""
    E = gate_up.num_experts
    routed = sort_by_expert(expert_ids, E, tile.block_m, overlap)
    rows = gather_routes(x, routed, E, expert_ids.shape[1], overlap)
    hidden = x.new_empty(len(rows), gate_up.rows.num_outputs // E // 2)
    parts = x.new_empty(routed.num_routes, down.rows.num_outputs // E)
    gemm(rows, gate_up, gate_up_biases, expert_weights, hidden, routed, tile, int(activation), limit, overlap)
    gemm(hidden, down, down_biases, expert_weights, parts, routed, tile, overlap=overlap)
    return parts


def gather_routes(
    x: Tensor, routed: RoutedTokens, num_experts: int, routes_a_row: int, overlap: bool = False
) -> Tensor:
    """x [T, K] -> [tiles * block, K]: the rows of the tiles' routes. Padding is not written: a route's sums are of its
    own row."""
    K = x.shape[1]
    assert x.stride(1) == 1
    out = x.new_empty(len(routed.routes), K)
    _gather_kernel[(len(out) // GATHERED,)](
        x,
        out,
        routed.routes,
        routed.tile_experts,
        routed.num_routes,
        num_experts,
        K,
        x.stride(0),
        routes_a_row,
        TILE=routed.block,
        ROWS=GATHERED,
        BLOCK=1024,
        OVERLAP=overlap,
        **overlap_options(overlap),
    )
    return out


@triton.jit(do_not_specialize=["num_routes", "num_experts"])
def _gather_kernel(
    x_ptr,
    out_ptr,
    route_ptr,
    tile_expert_ptr,
    num_routes,
    num_experts,
    K,
    x_stride,
    routes_a_row,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    first = tl.program_id(0) * ROWS
    expert = tl.load(tile_expert_ptr + first // TILE)
    if (expert >= 0) & (expert < num_experts):
        slots = first + tl.arange(0, ROWS)
        routes = tl.load(route_ptr + slots)
        rows = routes // routes_a_row
        for start in range(0, K, BLOCK):
            k = start + tl.arange(0, BLOCK)
            inside = (routes < num_routes)[:, None] & (k < K)[None, :]
            values = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_stride + k[None, :], mask=inside)
            tl.store(out_ptr + slots.to(tl.int64)[:, None] * K + k[None, :], values, mask=inside)
