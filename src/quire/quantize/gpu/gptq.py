"""`gptq.py` in torch. A block of inputs is rounded by one kernel, which keeps its rows in registers."""

from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from quire.quantize.gptq import BLOCK, GPTQOptions, damping_shares, input_order, original_order
from quire.quantize.gpu.integers import TorchIntegers, inverse, ranges
from quire.quantize.integers import IntegerGrid
from quire.quantize.plan import QuantizeError

KERNEL_ROWS = 16  # outputs that a program of the kernel rounds


@dataclass(frozen=True, slots=True, eq=False)
class TorchRoundingOrder:
    """`RoundingOrder` on a device; `order` is on the host too."""

    order: NDArray[np.intp]
    order_on: Tensor
    factor: Tensor
    importance: Tensor
    dead: Tensor


def rounding_order(moments: Tensor, group: int, options: GPTQOptions) -> TorchRoundingOrder:
    diagonal = moments.diagonal().clone()
    order = input_order(diagonal.cpu().numpy(), group, options.order)
    order_on = torch.from_numpy(order).to(moments.device)
    dead = (diagonal <= 0)[order_on]
    in_order = moments if options.order == "inputs" else moments[order_on][:, order_on]
    factor = _inverse_factor(in_order, dead, options.damping)
    return TorchRoundingOrder(order, order_on, factor, diagonal[order_on].clamp(min=1e-12), dead)


def _inverse_factor(moments: Tensor, dead: Tensor, damping: float) -> Tensor:
    """See gptq.py: backwards, the moments are L L^T, and the factor is the inverse of L backwards."""
    matrix = moments.flip(0, 1).double()
    diagonal = matrix.diagonal()
    diagonal.masked_fill_(dead.flip(0), 1.0)
    mean = float(diagonal.mean())
    for share in damping_shares(damping):
        diagonal += share * mean
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not int(failed):
            size, device = len(matrix), matrix.device
            del matrix, diagonal  # these are the largest arrays of a run
            inverted = torch.linalg.solve_triangular(
                lower, torch.eye(size, dtype=torch.float64, device=device), upper=False
            )
            del lower
            return inverted.float().flip(0, 1)
    raise QuantizeError(
        "the second moments of a layer's inputs cannot be inverted", "use more --calibration-tokens or a larger --damping"
    )


def gptq(w: Tensor, shared: TorchRoundingOrder, grid: IntegerGrid, options: GPTQOptions) -> TorchIntegers:
    outputs, inputs = w.shape
    size = grid.group_of(inputs)
    step = gcd(size, BLOCK)  # a group begins with a block
    weights = w[:, shared.order_on].masked_fill(shared.dead, 0.0)
    q = torch.empty(outputs, inputs, dtype=torch.uint8, device=w.device)
    scales = torch.empty(outputs, inputs // size, dtype=torch.float16, device=w.device)
    zeros = torch.empty(outputs, inputs // size, dtype=torch.uint8, device=w.device)
    for first in range(0, inputs, step):
        last, group = first + step, first // size
        if first % size == 0:
            counted = shared.importance[None, first : first + size] if options.search else None
            stored, zero = ranges(weights[:, first : first + size], grid, counted)
            scales[:, group], zeros[:, group] = stored[:, 0], zero[:, 0]
        factor = shared.factor[first:last, first:last]
        block, levels = weights[:, first:last], grid.levels
        errors = round_block(block, stored[:, 0].float(), zero[:, 0].float(), factor, q[:, first:last], levels)
        if last < inputs:
            weights[:, last:].addmm_(errors, shared.factor[first:last, last:], alpha=-1)
    back, groups, places = original_order(shared.order, size, options.order)
    q = q if options.order == "inputs" else q[:, torch.from_numpy(back).to(w.device)]
    there = torch.from_numpy(places).to(w.device)
    return TorchIntegers.of(grid.bits, q, scales[:, there], zeros[:, there], groups)


def round_block(weights: Tensor, scale: Tensor, zero: Tensor, factor: Tensor, q: Tensor, levels: int) -> Tensor:
    """Round weights [outputs, n], one input after the other, into q [outputs, n] -> the errors that later inputs make up
    for. scale and zero [outputs], factor [n, n]. `weights` stay as they are."""
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
    """The same in one kernel, for n a power of two."""
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
