# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Experts of 16 bits for one token or a few, without tensor cores: no tiles, no sorting, and no sums left in memory.

A program of the first kernel has some rows of gate and up of one route. One of the second has some outputs of a token,
and goes through the down rows of all its experts, so their sum is what it stores. It starts when the experts are known,
and loads the first of their rows while the first kernel ends. Programs ask for the next inputs before they multiply
these, and are small enough to be on the device all at once, so that memory waits for none of them."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.activation import activate_times
from quire.ops.gpu.linear.gemv import NEIGHBOURS
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs, wait_then_launch
from quire.ops.opset import Activation

MAX_GEMV_ROUTES = 16


class ExpertGemvConfig(NamedTuple):
    block_n: int  # outputs a program
    block_k: int  # inputs a step
    warps: int


GATE_UP = ExpertGemvConfig(block_n=8, block_k=256, warps=4)
DOWN = ExpertGemvConfig(block_n=4, block_k=128, warps=8)


def can_gemv(x: Tensor, gate_up: object, down: object, num_routes: int) -> bool:
    """Whether the experts are plain, and the routes few."""
    plain = isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    return plain and x.element_size() == 2 and num_routes <= MAX_GEMV_ROUTES


def gemv_mlp(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    gate_up_biases: Tensor | None,
    down_biases: Tensor | None,
    limit: float = 0.0,
    overlap: bool = False,
) -> Tensor:
    """`moe_mlp` of gated experts."""
    (T, k), (E, N, H) = expert_ids.shape, gate_up.shape
    inner, num_outputs = N // 2, down.shape[1]
    assert x.shape == (T, H) and down.shape == (E, num_outputs, inner) and x.stride(1) == 1
    assert gate_up.is_contiguous() and down.is_contiguous()
    assert expert_ids.is_contiguous() and expert_weights.is_contiguous()
    hidden, out = x.new_empty(T * k, inner), x.new_empty(T, num_outputs)
    options = {"OVERLAP": overlap, **overlap_options(overlap)}
    _gate_up_kernel[(triton.cdiv(inner, GATE_UP.block_n), T * k)](
        x,
        gate_up,
        gate_up_biases,
        expert_ids,
        hidden,
        E,
        inner,
        H,
        x.stride(0),
        k,
        ACTIVATION=int(activation),
        LIMIT=limit,
        BLOCK_N=GATE_UP.block_n,
        BLOCK_K=min(GATE_UP.block_k, int(triton.next_power_of_2(H))),
        num_warps=GATE_UP.warps,
        **options,
    )
    _down_kernel[(triton.cdiv(num_outputs, DOWN.block_n), T)](
        hidden,
        down,
        down_biases,
        expert_ids,
        expert_weights,
        out,
        E,
        num_outputs,
        inner,
        TOP_K=k,
        TOP_K_PAD=triton.next_power_of_2(k),
        BLOCK_N=DOWN.block_n,
        BLOCK_K=DOWN.block_k,
        num_warps=DOWN.warps,
        **options,
    )
    return out


@triton.jit
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    id_ptr,
    hidden_ptr,
    num_experts,
    N,
    K,
    x_stride,
    routes_a_row,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden[route] = activated gate rows times up rows"""
    route = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < N
    mine = tl.minimum(outputs, N - 1).to(tl.int64)
    x_row = x_ptr + (route // routes_a_row).to(tl.int64) * x_stride
    wait_then_launch(OVERLAP)  # the next kernel reads the ids before it waits
    expert = tl.load(id_ptr + route)
    if (expert >= 0) & (expert < num_experts):
        gate_rows = w_ptr + (expert.to(tl.int64) * (2 * N) + mine)[:, None] * K
        up_rows = gate_rows + tl.cast(N, tl.int64) * K
        BY_NEIGHBOURS: tl.constexpr = (BLOCK_N, BLOCK_K // NEIGHBOURS, NEIGHBOURS)  # a thread has all of a row of them
        gate = tl.zeros((BLOCK_N, BLOCK_K // NEIGHBOURS), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_K // NEIGHBOURS), tl.float32)
        k = tl.arange(0, BLOCK_K)
        gates = _load(gate_rows, k, K)
        ups = _load(up_rows, k, K)
        for _ in range(0, K, BLOCK_K):
            next_gates = _load(gate_rows, k + BLOCK_K, K)
            next_ups = _load(up_rows, k + BLOCK_K, K)
            x = tl.load(x_row + k, mask=k < K, other=0.0, eviction_policy="evict_last").to(tl.float32)[None, :]
            gate += tl.sum(tl.reshape(gates.to(tl.float32) * x, BY_NEIGHBOURS), axis=2)
            up += tl.sum(tl.reshape(ups.to(tl.float32) * x, BY_NEIGHBOURS), axis=2)
            gates, ups, k = next_gates, next_ups, k + BLOCK_K
        gate_sums, up_sums = tl.sum(gate, axis=1), tl.sum(up, axis=1)
        if bias_ptr is not None:
            biases = bias_ptr + expert * (2 * N) + mine
            gate_sums += tl.load(biases)
            up_sums += tl.load(biases + N)
        hidden = activate_times(gate_sums, up_sums, ACTIVATION, LIMIT)
        tl.store(hidden_ptr + route.to(tl.int64) * N + outputs, hidden.to(hidden_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _down_kernel(
    hidden_ptr,
    w_ptr,
    bias_ptr,
    id_ptr,
    weight_ptr,
    out_ptr,
    num_experts,
    N,
    K,
    TOP_K: tl.constexpr,
    TOP_K_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out[token] = the sum of its routes' down rows times hidden, weighted"""
    token = tl.program_id(1)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mine = tl.minimum(outputs, N - 1).to(tl.int64)
    rank = tl.arange(0, TOP_K_PAD)
    routes = token.to(tl.int64) * TOP_K + rank
    experts = tl.load(id_ptr + routes, mask=rank < TOP_K, other=-1, cache_modifier=".cg")
    here = (experts >= 0) & (experts < num_experts)
    weights = tl.load(weight_ptr + routes, mask=here, other=0.0, cache_modifier=".cg")
    first_rows = tl.where(here, experts, 0).to(tl.int64) * N
    rows = w_ptr + (mine[:, None] + first_rows[None, :])[:, :, None] * K  # [BLOCK_N, TOP_K_PAD, 1]
    hidden_rows = hidden_ptr + routes[:, None] * K
    k = tl.arange(0, BLOCK_K)
    w = _load_routes(rows, here, k, K)
    next_w = _load_routes(rows, here, k + BLOCK_K, K)
    wait_for_inputs(OVERLAP)
    acc = tl.zeros((BLOCK_N, TOP_K_PAD, BLOCK_K // NEIGHBOURS), tl.float32)
    for _ in range(0, K, BLOCK_K):
        last_w = _load_routes(rows, here, k + 2 * BLOCK_K, K)
        there = here[:, None] & (k < K)[None, :]
        x = tl.load(hidden_rows + k[None, :], mask=there, other=0.0, eviction_policy="evict_last").to(tl.float32)
        products = tl.reshape(w.to(tl.float32) * x[None, :, :], (BLOCK_N, TOP_K_PAD, BLOCK_K // NEIGHBOURS, NEIGHBOURS))
        acc += tl.sum(products, axis=3)
        w, next_w, k = next_w, last_w, k + BLOCK_K
    parts = tl.sum(acc, axis=2)
    if bias_ptr is not None:
        biases = bias_ptr + mine[:, None] + first_rows[None, :]
        parts += tl.load(biases, mask=here[None, :] & (outputs < N)[:, None], other=0.0)
    total = tl.sum(parts * weights[None, :], axis=1)
    tl.store(out_ptr + token.to(tl.int64) * N + outputs, total.to(out_ptr.dtype.element_ty), mask=outputs < N)


@triton.jit
def _load(rows, k, K):
    """rows [n, 1] at k -> [n, k]"""
    return tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_routes(rows, here, k, K):
    """rows [n, routes, 1] at k -> [n, routes, k]"""
    there = here[:, None] & (k < K)[None, :]
    return tl.load(rows + k[None, None, :], mask=there[None, :, :], other=0.0, eviction_policy="evict_first")
