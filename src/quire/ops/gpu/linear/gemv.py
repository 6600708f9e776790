# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: RUF005 (Triton adds tuples, and does not unpack them)
"""GEMV, y = w @ x for one row x or up to four, without tensor cores: each program reads a few whole rows of w, 16 bytes
a thread, and multiplies what it has read with all rows of x.

The first of w is loaded before the program waits for x, so memory is busy while the kernel before this one ends."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

MAX_GEMV_ROWS = 4  # of x: beyond, multiplying takes longer than reading w
NEIGHBOURS = tl.constexpr(8)  # values of 16 bits that a thread loads at once, and adds up at once if x has several rows


class GemvConfig(NamedTuple):
    block_n: int  # outputs a program
    block_k: int  # inputs a step
    warps: int
    stages: int  # steps whose weights are in flight together


def linear_gemv(x: Tensor, w: Tensor, bias: Tensor | None, config: GemvConfig, overlap: bool = False) -> Tensor:
    """x [M, K], w [N, K] -> [M, N] in x's dtype. Rows of both may be strided."""
    (M, K), N = x.shape, w.shape[0]
    assert 1 <= M <= MAX_GEMV_ROWS and w.shape[1] == K and x.stride(1) == 1 and w.stride(1) == 1
    out = x.new_empty(M, N)
    grid, options = (triton.cdiv(N, config.block_n),), overlap_options(overlap)
    blocks = {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.stages, "OVERLAP": overlap}
    if M == 1:
        _gemv_kernel[grid](x, w, bias, out, N, K, w.stride(0), **blocks, num_warps=config.warps, **options)
    else:
        strides = x.stride(0), w.stride(0)
        _rows_kernel[grid](x, w, bias, out, N, K, *strides, ROWS=M, **blocks, num_warps=config.warps, **options)
    return out


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    w_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < N
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * w_stride
    k = tl.arange(0, BLOCK_K)
    w = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    acc = w.to(tl.float32) * x.to(tl.float32)[None, :]
    whole = tl.maximum(K // BLOCK_K * BLOCK_K, BLOCK_K)
    for first in tl.range(BLOCK_K, whole, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
        x = tl.load(x_ptr + k, eviction_policy="evict_last")
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    if whole < K:
        k = whole + tl.arange(0, BLOCK_K)
        w = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    y = tl.sum(acc, axis=1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rows_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    x_stride,
    w_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * w_stride
    k = tl.arange(0, BLOCK_K)
    w = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    wait_for_inputs(OVERLAP)
    sums = _products(w.to(tl.float32), x_ptr, x_stride, k, K, ROWS, True)
    whole = tl.maximum(K // BLOCK_K * BLOCK_K, BLOCK_K)
    for first in tl.range(BLOCK_K, whole, BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        w = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
        sums = _add(sums, _products(w.to(tl.float32), x_ptr, x_stride, k, K, ROWS, False), ROWS)
    if whole < K:
        k = whole + tl.arange(0, BLOCK_K)
        w = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0)
        sums = _add(sums, _products(w.to(tl.float32), x_ptr, x_stride, k, K, ROWS, True), ROWS)
    y = _add_up(sums, ROWS)  # [n, 2, 2]
    rows = tl.arange(0, 2)[None, :, None] + 2 * tl.arange(0, 2)[None, None, :]
    outputs = outputs[:, None, None]
    inside = outputs < N
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * N + outputs, y.to(out_ptr.dtype.element_ty), mask=inside & (rows < ROWS))


@triton.jit
def _products(w, x_ptr, x_stride, k, K, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """w [n, k] fp32 times every row of x at k -> a tuple of sums over neighbours [n, k / NEIGHBOURS]: a thread has all
    of them, and keeps one number for eight."""
    sums = ()
    for row in tl.static_range(ROWS):
        if MASKED:
            x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0)
        else:
            x = tl.load(x_ptr + row * x_stride + k, eviction_policy="evict_last")
        product = w * x.to(tl.float32)[None, :]
        of_row = tl.sum(product.reshape(w.shape[0], w.shape[1] // NEIGHBOURS, NEIGHBOURS), axis=2)
        sums = sums + (of_row,)  # type: ignore[assignment]
    return sums


@triton.jit
def _add(a, b, ROWS: tl.constexpr):
    sums = ()
    for row in tl.static_range(ROWS):
        sums = sums + (a[row] + b[row],)  # type: ignore[assignment]
    return sums


@triton.jit
def _add_up(sums, ROWS: tl.constexpr):
    """Up to four rows of sums [n, k] -> [n, 2, 2], row i at [n, i % 2, i // 2]: the threads exchange all at once."""
    last: tl.constexpr = ROWS - 1
    second: tl.constexpr = min(last, 2)
    return tl.sum(tl.join(tl.join(sums[0], sums[1]), tl.join(sums[second], sums[last])), axis=1)
