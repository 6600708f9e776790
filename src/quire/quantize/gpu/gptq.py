"""`gptq.py` in torch."""

from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.quantize.gptq import RIDGE, GPTQOptions, damping_shares, input_order, original_order
from quire.quantize.gpu.integers import TorchIntegers, ranges
from quire.quantize.gpu.round_block import round_block
from quire.quantize.integers import IntegerGrid
from quire.quantize.plan import QuantizeError

BLOCK = 128  # inputs of one kernel


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
    order = input_order(diagonal.cpu().numpy(), group, options.chosen_order)
    order_on = torch.from_numpy(order).to(moments.device)
    dead = (diagonal <= 0)[order_on]
    factor = _inverse_factor(moments, None if options.chosen_order == "inputs" else order_on, dead, options.damping)
    return TorchRoundingOrder(order, order_on, factor, factor.diagonal().square().reciprocal(), dead)


def _inverse_factor(moments: Tensor, order: Tensor | None, dead: Tensor, damping: float) -> Tensor:
    """See gptq.py: backwards, the moments are L L^T, and the factor is the inverse of L backwards."""
    matrix = (moments if order is None else moments[order][:, order]).flip(0, 1).double()
    diagonal = matrix.diagonal()
    diagonal.masked_fill_(dead.flip(0), 1.0)
    mean = float(diagonal.mean())
    for share in damping_shares(damping):
        diagonal += share * mean
        lower, failed = torch.linalg.cholesky_ex(matrix)
        if not int(failed):
            size, device = len(matrix), matrix.device
            del matrix, diagonal  # these are the largest arrays of a run
            inverted = torch.eye(size, dtype=torch.float64, device=device)
            torch.linalg.solve_triangular(lower, inverted, upper=False, out=inverted)
            del lower
            return inverted.float().flip(0, 1).contiguous()  # solvers on a GPU lay out columns
    raise QuantizeError(
        "the second moments of a layer's inputs cannot be inverted",
        "use more --calibration-tokens or a larger --damping",
    )


def made_up(w: Tensor, inputs: Tensor, outputs: Tensor | None, moments: Tensor) -> Tensor:
    """See gptq.py."""
    matrix = moments.clone()
    matrix.diagonal().add_(RIDGE * float(moments.diagonal().mean()) or 1)
    lost = w @ inputs if outputs is None else torch.addmm(outputs, w, inputs)
    return w + torch.cholesky_solve(lost.T, torch.linalg.cholesky(matrix)).T


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
    back, groups, places = original_order(shared.order, size, options.chosen_order)
    q = q if options.chosen_order == "inputs" else q[:, torch.from_numpy(back).to(w.device)]
    there = torch.from_numpy(places).to(w.device)
    return TorchIntegers.of(grid.bits, q, scales[:, there], zeros[:, there], groups)
