# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T for few rows of x, as fast as w can be read.

The GEMM is transposed, w [N, K] @ x.T [K, M]: tensor cores take 64 outputs at a time and as few as 8 tokens, so 16
tokens cost no more arithmetic than they must, and w goes from memory through shared memory into the tensor cores
without passing a register. `num_stages` tiles of w are in flight at any time."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.split_k import finish, split_launch
from quire.ops.gpu.overlap import overlap_options, prefetch, wait_for_inputs


class StreamConfig(NamedTuple):
    block_m: int  # tokens a program: 16, 32, 64 or 128
    block_n: int  # outputs a program: 64 or 128
    block_k: int  # inputs a step
    splits: int  # of K
    serial: bool  # one program takes all splits of its tile, one after the other: the same sums, when tiles suffice
    warps: int
    stages: int


def linear_stream(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    config: StreamConfig,
    tickets: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """x [M, K], w [N, K] -> [M, N] in x's dtype. Rows of both may be strided."""
    (M, K), N = x.shape, w.shape[0]
    assert w.shape[1] == K and x.stride(1) == 1 and w.stride(1) == 1 and x.dtype == w.dtype
    out = x.new_empty(M, N)
    launch = split_launch(config, out, bias, tickets)
    _stream_kernel[launch.grid](
        x,
        w,
        launch.to,
        M,
        N,
        K,
        x.stride(0),
        w.stride(0),
        WHOLE_CHUNKS=K % config.block_k == 0,
        BLOCK_K=config.block_k,
        OVERLAP=overlap,
        num_warps=config.warps,
        **launch.constants,
        **overlap_options(overlap),
    )
    return out


@triton.jit(do_not_specialize=["M"])
def _stream_kernel(
    x_ptr,
    w_ptr,
    to,  # OutputArgs
    M,
    N,
    K,
    x_stride,
    w_stride,
    WHOLE_CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Outputs past the end are computed from the last row and never stored: no mask on the reads of w.
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * w_stride
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * x_stride
    present = (tokens < M)[None, :]
    chunks = tl.cdiv(K, BLOCK_K)
    split_chunks = tl.cdiv(chunks, SPLITS)
    TURNS: tl.constexpr = SPLITS // SHARES
    if OVERLAP:
        first_k = tl.program_id(1) * TURNS * split_chunks * BLOCK_K + tl.arange(0, 8) * 64  # 8 cache lines of each row
        prefetch(w_rows + tl.minimum(first_k, K - 1)[None, :])
    wait_for_inputs(OVERLAP)

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for turn in range(TURNS):
        first = (tl.program_id(1) * TURNS + turn) * split_chunks
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for chunk in tl.range(first, tl.minimum(first + split_chunks, chunks), num_stages=STAGES):
            k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
            if WHOLE_CHUNKS:
                w = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
                x = tl.load(x_rows + k[:, None], mask=present, other=0.0)
            else:
                w = tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
                x = tl.load(x_rows + k[:, None], mask=present & (k < K)[:, None], other=0.0)
            acc = tl.dot(w, x, acc, input_precision="ieee")  # fp32 stays fp32
        total += acc
    finish(total, to, outputs, tokens, N, M, SHARES)
