# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Every head's columns times a matrix of its own: a batched GEMM of cuBLAS, or, for batch-invariant rows, tiles of one
size."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import dot_type, head_args

BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 64


def linear_heads(x: Tensor, w: Tensor, out: Tensor, *, batch_invariant: bool = False) -> None:
    """x [T, heads, inputs], w [heads, outputs, inputs] -> out [T, heads, outputs], all of one type. All may be strided,
    the last axis may not."""
    (num_tokens, num_heads, num_inputs), num_outputs = x.shape, w.shape[1]
    assert w.shape == (num_heads, num_outputs, num_inputs) and out.shape == (num_tokens, num_heads, num_outputs)
    assert x.stride(2) == w.stride(2) == out.stride(2) == 1
    if num_tokens == 0:
        return
    if not batch_invariant:
        torch.bmm(x.transpose(0, 1), w.transpose(1, 2), out=out.transpose(0, 1))
        return
    _linear_heads[(triton.cdiv(num_tokens, BLOCK_M), triton.cdiv(num_outputs, BLOCK_N), num_heads)](
        head_args(x),
        w,
        head_args(out),
        num_tokens,
        w.stride(0),
        w.stride(1),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        DOT_TYPE=dot_type(x, x.dtype),
        num_warps=4,
        num_stages=3,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_heads(
    x,  # HeadArgs
    w,
    out,  # HeadArgs
    num_tokens,
    w_head,
    w_output,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    head = tl.program_id(2).to(tl.int64)
    present, wanted = token < num_tokens, output < OUTPUTS
    x_rows = x.ptr + head * x.head + token.to(tl.int64)[:, None] * x.token
    w_rows = w + head * w_head + output[None, :] * w_output
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, INPUTS, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        inside = k < INPUTS
        rows = tl.load(x_rows + k[None, :], mask=present[:, None] & inside[None, :], other=0.0).to(DOT_TYPE)
        columns = tl.load(w_rows + k[:, None], mask=inside[:, None] & wanted[None, :], other=0.0).to(DOT_TYPE)
        acc = tl.dot(rows, columns, acc, input_precision="ieee")
    out_rows = out.ptr + head * out.head + token.to(tl.int64)[:, None] * out.token + output[None, :]
    tl.store(out_rows, acc, mask=present[:, None] & wanted[None, :])
