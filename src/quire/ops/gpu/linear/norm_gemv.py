# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""An RMS norm and the matmul behind it as one kernel, for few rows and few outputs: the router of experts.

Every program norms the row itself, so no kernel stands between the residual stream and the matmul. The first program
stores the rows that it norms, and the new residual stream, for others that read them."""

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

MAX_ROWS = 8
MAX_OUTPUTS = 512  # beyond, norming again and again takes longer than a kernel of its own
MAX_INPUTS = 8192  # that a program holds in registers, times BLOCK_N
BLOCK_N = 4  # outputs a program


def can_norm_gemv(x: Tensor, w: Tensor, all_outputs: int) -> bool:
    """x [rows, inputs] is what is normed; `all_outputs`: of the matrix that w has some rows of."""
    is_small = 0 < len(x) <= MAX_ROWS and all_outputs <= MAX_OUTPUTS and x.shape[1] <= MAX_INPUTS
    return is_small and x.element_size() == w.element_size() == 2


def norm_gemv(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    w: Tensor,
    bias: Tensor | None = None,
    overlap: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """x and residual [M, K], w [N, K] -> (normed @ w.T + bias [M, N], normed [M, K] = rms_norm(x + residual), x +
    residual)."""
    (M, K), N = x.shape, len(w)
    assert w.shape[1] == K and x.stride(1) == 1 and w.stride(1) == 1 and norm_weight.shape == (K,)
    normed, total = x.new_empty(M, K), x if residual is None else residual.new_empty(M, K)
    out = x.new_empty(M, N)
    block_k = max(int(triton.next_power_of_2(K)), 256)
    _norm_gemv_kernel[(triton.cdiv(N, BLOCK_N), M)](
        x,
        residual,
        norm_weight,
        w,
        bias,
        normed,
        total,
        out,
        N,
        K,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        w.stride(0),
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        OVERLAP=overlap,
        num_warps=min(max(block_k // 256, 1), 16),
        **overlap_options(overlap),
    )
    return out, normed, total


@triton.jit
def _norm_gemv_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    normed_ptr,
    total_ptr,
    out_ptr,
    N,
    K,
    eps,
    x_stride,
    residual_stride,
    w_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * w_stride
    w = tl.load(w_rows + k[None, :], mask=inside[None, :], other=0.0)
    norm = tl.load(norm_ptr + k, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * residual_stride + k, mask=inside, other=0.0).to(tl.float32)
    total = x.to(total_ptr.dtype.element_ty)
    x = total.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * norm).to(normed_ptr.dtype.element_ty)
    if tl.program_id(0) == 0:
        tl.store(normed_ptr + row * K + k, normed, mask=inside)
        if residual_ptr is not None:
            tl.store(total_ptr + row * K + k, total, mask=inside)
    y = tl.sum(w.to(tl.float32) * normed.to(tl.float32)[None, :], axis=1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=outputs < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + outputs, y.to(out_ptr.dtype.element_ty), mask=outputs < N)
