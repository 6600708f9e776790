# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""GPTQ of a block of inputs: one kernel rounds them one after the other, and keeps its rows in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.quantize.gpu.integers import inverse

KERNEL_ROWS = 16  # outputs that a program of the kernel rounds


def round_block(weights: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, q: Tensor, levels: int) -> Tensor:
    """Round weights [outputs, n], one input after the other, into q [outputs, n] -> the errors that later inputs make
    up for. scale and zero [outputs], factor [n, n]. `weights` stay as they are."""
    n = weights.shape[1]
    compiled = weights.is_cuda and n >= 16 and n & (n - 1) == 0
    return (round_block_compiled if compiled else round_block_plain)(weights, scale, zero, factor, q, levels)


def round_block_plain(weights: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, q: Tensor, levels: int) -> Tensor:
    block, over = weights.clone(), inverse(scale)
    for index in range(block.shape[1]):
        column = block[:, index].clone()
        rounded = (column * over + zero).round_().clamp_(0, levels)
        q[:, index] = rounded.byte()
        error = (column - scale * (rounded - zero)) / factor[index, index]
        block[:, index] = error
        block[:, index + 1 :] -= error[:, None] * factor[index, index + 1 :]
    return block


def round_block_compiled(
    weights: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, q: Tensor, levels: int
) -> Tensor:
    """`round_block` in one kernel, for n a power of two."""
    outputs, n = weights.shape
    errors = torch.empty(outputs, n, dtype=torch.float32, device=weights.device)
    grid = (triton.cdiv(outputs, KERNEL_ROWS),)
    _round_block_kernel[grid](
        weights, scale, zero, factor, q, errors, outputs, levels, weights.stride(0), factor.stride(0), q.stride(0),
        N=n, ROWS=KERNEL_ROWS,
    )  # fmt: skip
    return errors


@triton.jit
def _round_block_kernel(
    weights, scales, zeros, factor, q, errors, outputs, levels, weight_stride, factor_stride, q_stride,
    N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, N)
    inside = rows < outputs
    block = tl.load(weights + rows[:, None] * weight_stride + columns, mask=inside[:, None], other=0.0)
    scale = tl.load(scales + rows, mask=inside, other=1.0)
    zero = tl.load(zeros + rows, mask=inside, other=0.0)
    over = tl.where(scale == 0, 0.0, 1.0 / scale)
    for index in range(N):
        is_column = columns == index
        column = tl.sum(tl.where(is_column[None, :], block, 0.0), 1)
        shifted = column * over + zero
        # To the nearest integer, ties to even: the sum with 1.5 * 2^23 has no fraction.
        near = (tl.minimum(tl.maximum(shifted, -1.0), levels + 1.0) + 12582912.0) - 12582912.0
        rounded = tl.minimum(tl.maximum(near, 0.0), levels * 1.0)
        tl.store(q + rows * q_stride + index, rounded.to(tl.uint8), mask=inside)
        error = (column - scale * (rounded - zero)) / tl.load(factor + index * factor_stride + index)
        later = tl.load(factor + index * factor_stride + columns, mask=columns > index, other=0.0)
        block = tl.where(is_column[None, :], error[:, None], block - error[:, None] * later[None, :])
    tl.store(errors + rows[:, None] * N + columns, block, mask=inside[:, None])
