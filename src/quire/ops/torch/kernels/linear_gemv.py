# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = w @ x for one row x, without tensor cores: each program reads a few whole rows of w, 16 bytes a thread.

The first of w does not depend on x. So it is asked for before x is waited for, and memory is busy while the kernel
before this one ends."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.torch.kernels.overlap import overlap_options, wait_for_inputs


class GemvConfig(NamedTuple):
    block_n: int  # outputs a program
    block_k: int  # inputs a step
    warps: int
    depth: int  # steps whose weights are on their way


def linear_gemv(x: Tensor, w: Tensor, bias: Tensor | None, config: GemvConfig, overlap: bool = False) -> Tensor:
    """x [1, K], w [N, K] -> [1, N] in x's dtype. Rows of w may be strided."""
    (M, K), N = x.shape, w.shape[0]
    assert M == 1 and w.shape[1] == K and x.stride(1) == 1 and w.stride(1) == 1
    out = x.new_empty(1, N)
    _gemv_kernel[(triton.cdiv(N, config.block_n),)](
        x,
        w,
        bias,
        out,
        N,
        K,
        w.stride(0),
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        DEPTH=config.depth,
        ONCE=K <= config.depth * config.block_k,
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
    w_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
    ONCE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < N
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * w_stride
    columns = tl.arange(0, BLOCK_K)
    ahead = ()
    for d in tl.static_range(DEPTH):
        ahead = ahead + (load_columns(w_rows, d * BLOCK_K + columns, K),)  # noqa: RUF005 (the compiler's only way)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for first in range(0, K, DEPTH * BLOCK_K):
        following = ()
        for d in tl.static_range(DEPTH):
            k = first + d * BLOCK_K + columns
            x = tl.load(x_ptr + k, mask=k < K, other=0.0)
            sums += ahead[d].to(tl.float32) * x.to(tl.float32)[None, :]
            if not ONCE:
                following = following + (load_columns(w_rows, k + DEPTH * BLOCK_K, K),)  # noqa: RUF005
        if not ONCE:
            ahead = following
    y = tl.sum(sums, axis=1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_columns(rows, k, K):
    return tl.load(rows + k[None, :], mask=(k < K)[None, :], other=0, eviction_policy="evict_first")
