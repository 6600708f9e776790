# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: RUF005 (Triton adds tuples, and does not unpack them)
"""GEMV, y = w @ x for one row x or up to four, without tensor cores: each program reads a few whole rows of w, 16 bytes
a thread, and multiplies what it has read with all rows of x.

The first of w is loaded before the program waits for x, so memory is busy while the kernel before this one ends. A
thread adds eight neighbours up at once: its registers are for weights that are on their way, not for sums."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

MAX_GEMV_ROWS = 4  # of x: beyond, multiplying takes longer than reading w
NEIGHBOURS = tl.constexpr(8)  # values of 16 bits that a thread loads at once, and adds up at once


class GemvConfig(NamedTuple):
    block_n: int  # outputs a program
    block_k: int  # inputs a step
    warps: int
    ahead: int  # steps whose weights are loaded before x is there


def linear_gemv(x: Tensor, w: Tensor, bias: Tensor | None, config: GemvConfig, overlap: bool = False) -> Tensor:
    """x [M, K], w [N, K] -> [M, N] in x's dtype. Rows of both may be strided."""
    (M, K), N = x.shape, w.shape[0]
    assert 1 <= M <= MAX_GEMV_ROWS and w.shape[1] == K and x.stride(1) == 1 and w.stride(1) == 1
    out = x.new_empty(M, N)
    _gemv_kernel[(triton.cdiv(N, config.block_n),)](
        x,
        w,
        bias,
        out,
        N,
        K,
        x.stride(0),
        w.stride(0),
        ROWS=M,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        AHEAD=min(config.ahead, triton.cdiv(K, config.block_k)),
        WHOLE_STEPS=K % config.block_k == 0,
        OVERLAP=overlap,
        num_warps=config.warps,
        **overlap_options(overlap),
    )
    return out


@triton.jit
def _gemv_kernel(
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
    AHEAD: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * w_stride
    k = tl.arange(0, BLOCK_K)[None, :]
    ahead = (_load(w_rows, k, K, WHOLE_STEPS),)
    for step in tl.static_range(1, AHEAD):
        ahead = ahead + (_load(w_rows, step * BLOCK_K + k, K, WHOLE_STEPS),)  # type: ignore[assignment]
    wait_for_inputs(OVERLAP)
    sums = _products(ahead[0], x_ptr, x_stride, k, K, ROWS)
    for step in tl.static_range(1, AHEAD):
        products = _products(ahead[step], x_ptr, x_stride, step * BLOCK_K + k, K, ROWS)
        sums = _add(sums, products, ROWS)
    for first in range(AHEAD * BLOCK_K, K, BLOCK_K):
        w = _load(w_rows, first + k, K, WHOLE_STEPS)
        sums = _add(sums, _products(w, x_ptr, x_stride, first + k, K, ROWS), ROWS)
    if ROWS == 1:
        y = tl.sum(sums[0], axis=1)
        inside = outputs < N
        if bias_ptr is not None:
            y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        y = _add_up(sums, ROWS)  # [n, 2, 2]
        rows = tl.arange(0, 2)[None, :, None] + 2 * tl.arange(0, 2)[None, None, :]
        outputs = outputs[:, None, None]
        inside = outputs < N
        if bias_ptr is not None:
            y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + rows * N + outputs, y.to(out_ptr.dtype.element_ty), mask=inside & (rows < ROWS))


@triton.jit
def _load(rows, k, K, WHOLE_STEPS: tl.constexpr):
    if WHOLE_STEPS:
        return tl.load(rows + k, eviction_policy="evict_first")
    return tl.load(rows + k, mask=k < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _products(w, x_ptr, x_stride, k, K, ROWS: tl.constexpr):
    """w [n, k] times every row of x at k [1, k] -> a tuple of sums over neighbours [n, k / NEIGHBOURS]: a thread has
    all of them, and keeps one number for eight."""
    sums = ()
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0)  # without a mask it takes more registers
        product = w.to(tl.float32) * x.to(tl.float32)
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
