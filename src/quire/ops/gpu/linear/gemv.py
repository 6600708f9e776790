# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""GEMV, y = w @ x for one row x, without tensor cores: each program reads a few whole rows of w, 16 bytes a thread.

The first of w is loaded before the program waits for x, so memory is busy while the kernel before this one ends."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.overlap import overlap_options, wait_for_inputs


class GemvConfig(NamedTuple):
    block_n: int  # outputs a program
    block_k: int  # inputs a step
    warps: int
    stages: int  # steps whose weights are in flight together


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
        STAGES=config.stages,
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
