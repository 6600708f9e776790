# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Grouped GEMMs of 16-bit experts for prompts: tiles of 128 routes, weights copied by the TMA unit.

Routes are the rows of a tile and outputs its columns. A tile with at most 64 routes computes as many rows: an expert's
last tile is half empty on average. What lies between the two GEMMs is stored in the
order of the tiles, so the second one copies both operands. Sums are those of the kernel in moe.py, bit for bit."""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.gpu.activation import activate_times
from quire.ops.gpu.moe.sorting import find_tile
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

TILE_ROUTES = 128
HOPPER = 9  # compute capability
ALIGNMENT = 16  # bytes: of rows that the TMA unit copies


class TileConfig(NamedTuple):
    block_n: int  # outputs a program; of gate and of up as many each
    block_k: int  # inputs a step
    warps: int
    stages: int
    group: int  # tiles that take the same weights one after the other, while the L2 cache holds them


GATE_UP = TileConfig(block_n=128, block_k=64, warps=8, stages=4, group=8)
DOWN = TileConfig(block_n=256, block_k=64, warps=8, stages=4, group=4)


def can_tile(x: Tensor, gate_up: object, down: object) -> bool:
    """Whether the experts are plain, and the device has a TMA unit."""
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor) or x.element_size() != 2:
        return False
    aligned = all(w.is_contiguous() and not w.shape[2] * 2 % ALIGNMENT for w in (gate_up, down))
    return aligned and _has_tma(x.device)


@cache
def _has_tma(device: torch.device) -> bool:
    if device.type != "cuda":
        return True  # the interpreter has one
    return torch.version.hip is None and bool(torch.cuda.get_device_capability(device)[0] >= HOPPER)


def tile_gemm(
    x: Tensor,
    w: Tensor,
    biases: Tensor | None,
    expert_weights: Tensor,
    out: Tensor,
    routes: Tensor,
    tile_experts: Tensor,
    num_routes: int,
    routes_a_row: int,
    activation: int = -1,
    limit: float = 0.0,
    overlap: bool = False,
) -> None:
    """With an activation: x [T, K] -> out [tiles * TILE_ROUTES, N], gate and up, in the order of the tiles. Without:
    x [tiles * TILE_ROUTES, K] -> out [routes, N], times the routes' weights."""
    E, rows, K = w.shape
    gated = activation >= 0
    N = rows // 2 if gated else rows
    config = GATE_UP if gated else DOWN
    num_tiles = len(tile_experts)
    assert x.stride(1) == 1 and expert_weights.is_contiguous() and out.is_contiguous()
    _tile_kernel[(num_tiles * triton.cdiv(N, config.block_n),)](
        x,
        None if gated else _rows_desc(x, TILE_ROUTES, config.block_k),
        None if gated else _rows_desc(x, TILE_ROUTES // 2, config.block_k),
        _rows_desc(w.view(E * rows, K), config.block_n, config.block_k),
        biases,
        expert_weights,
        out,
        routes,
        tile_experts,
        num_tiles,
        num_routes,
        E,
        N,
        K,
        x.stride(0),
        routes_a_row,
        ACTIVATION=activation,
        LIMIT=limit,
        WHOLE_CHUNKS=K % config.block_k == 0,
        BLOCK_M=TILE_ROUTES,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.stages,
        TILES_A_GROUP=config.group,
        OVERLAP=overlap,
        num_warps=config.warps,
        **overlap_options(overlap),
    )


def _rows_desc(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])


@triton.jit(do_not_specialize=["num_tiles", "num_routes", "num_experts"])
def _tile_kernel(
    x_ptr,
    x_desc,
    x_half_desc,
    w_desc,
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
    routes_a_row,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
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
        first = column * BLOCK_N
        slot = tile * BLOCK_M
        to = bias_ptr, weight_ptr, out_ptr
        shape = N, K, num_routes
        if tl.load(route_ptr + slot + BLOCK_M // 2) < num_routes:
            x = x_ptr, x_desc, x_stride, routes_a_row
            _tile(
                x, w_desc, to, shape, route_ptr, slot, expert, first, ACTIVATION, LIMIT, WHOLE_CHUNKS, BLOCK_M, BLOCK_N,
                BLOCK_K, STAGES,
            )  # fmt: skip
        else:
            x_of_half = x_ptr, x_half_desc, x_stride, routes_a_row
            _tile(
                x_of_half, w_desc, to, shape, route_ptr, slot, expert, first, ACTIVATION, LIMIT, WHOLE_CHUNKS,
                BLOCK_M // 2, BLOCK_N, BLOCK_K, STAGES,
            )  # fmt: skip


@triton.jit
def _tile(
    x,  # pointer, descriptor or None, stride, routes a row
    w_desc,
    to,  # biases, weights, out
    shape,  # N, K, number of routes
    route_ptr,
    slot,
    expert,
    first,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    x_ptr, x_desc, x_stride, routes_a_row = x
    bias_ptr, weight_ptr, out_ptr = to
    N, K, num_routes = shape
    GATED: tl.constexpr = ACTIVATION >= 0
    slots, outputs = slot + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    routes, inside = tl.load(route_ptr + slots), outputs < N
    present = routes < num_routes
    if GATED:  # padding takes some row: what it becomes is no route's
        x_rows = x_ptr + (tl.minimum(routes, num_routes - 1) // routes_a_row).to(tl.int64) * x_stride
    else:
        weights = tl.load(weight_ptr + routes, mask=present, other=0.0)
    first_row = expert * (N * (2 if GATED else 1)) + first
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if GATED:
            k = start + tl.arange(0, BLOCK_K)
            if WHOLE_CHUNKS:
                rows = tl.load(x_rows[:, None] + k[None, :])
            else:
                rows = tl.load(x_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
        else:
            rows = x_desc.load([slot, start])
        acc = tl.dot(rows, w_desc.load([first_row, start]).T, acc)
        if GATED:
            up = tl.dot(rows, w_desc.load([first_row + N, start]).T, up)
    if bias_ptr is not None:
        biases = bias_ptr + first_row + tl.arange(0, BLOCK_N)
        acc += tl.load(biases, mask=inside, other=0.0)[None, :]
        if GATED:
            up += tl.load(biases + N, mask=inside, other=0.0)[None, :]
    if GATED:
        acc = activate_times(acc, up, ACTIVATION, LIMIT)
        offsets = slots.to(tl.int64)[:, None] * N + outputs[None, :]
        wanted = inside[None, :]  # padding, too: the second GEMM reads no row that is not written
    else:
        acc *= weights[:, None]
        offsets = routes.to(tl.int64)[:, None] * N + outputs[None, :]
        wanted = present[:, None] & inside[None, :]
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=wanted)
