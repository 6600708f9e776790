"""GPTQ: weights are rounded one input after the other, and what each rounding loses is made up for by the inputs that
follow, as far as the second moments of the calibration's inputs allow (Frantar et al., 2022).

    H = X^T X + damping        U: upper Cholesky factor of H^-1
    for input i:  error = (w_i - q_i) / U_ii;  w_j -= error * U_ij for j > i

Layers are quantized in the order of the forward pass, with inputs that come out of the layers quantized before."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.quantize.integers import GroupedIntegers, IntegerGrid, ranges
from quire.quantize.search import Floats, inverse
from quire.quantize.threads import in_threads, row_spans

# What is rounded first: inputs as they are; those with the largest second moments ("activation", whose groups are then
# no runs of inputs); or the same within groups, the groups that matter most first ("group"), which stay as they are.
ORDERS = ("inputs", "activation", "group")
BLOCK = 128  # inputs whose errors are carried on together
MAX_DAMPING = 10.0  # times the mean of the diagonal


@dataclass(frozen=True, slots=True)
class GPTQOptions:
    damping: float = 0.01  # of the mean of the diagonal of H
    order: str = "inputs"  # one of ORDERS
    search: bool = True  # ranges are chosen by weighted search


def second_moments(x: Floats) -> NDArray[np.float32]:
    """X^T X / rows"""
    sums = in_threads(lambda span: x[span].T @ x[span], row_spans(len(x)))
    total: Floats = sum(sums[1:], start=sums[0])
    return total / np.float32(len(x))


def gptq(w: Floats, moments: Floats, grid: IntegerGrid, options: GPTQOptions) -> GroupedIntegers:
    """`moments` [inputs, inputs]: of the inputs, as `second_moments` gives them."""
    outputs, inputs = w.shape
    size = grid.group_of(inputs)
    diagonal = np.diagonal(moments).copy()
    dead = diagonal <= 0
    order = _order(diagonal, size, options.order)
    factor = _inverse_factor(moments[np.ix_(order, order)], dead[order], options.damping)
    weights = np.where(dead, np.float32(0), w)[:, order]
    importance = np.maximum(diagonal[order], np.float32(1e-12))
    q = np.empty((outputs, inputs), np.uint8)
    scales = np.empty((outputs, inputs // size), np.float16)
    zeros = np.empty((outputs, inputs // size), np.uint8)
    for first in range(0, inputs, BLOCK):
        last = min(first + BLOCK, inputs)
        errors = np.empty((outputs, last - first), np.float32)
        block = weights[:, first:last].copy()
        for index in range(first, last):
            if index % size == 0:
                group = slice(index, index + size)
                current = weights[:, group].copy()
                inside = slice(index, min(index + size, last))
                current[:, : inside.stop - inside.start] = block[:, index - first : inside.stop - first]
                counted = np.broadcast_to(importance[group], current.shape) if options.search else None
                stored, zero = ranges(current, grid, counted)
                scales[:, index // size], zeros[:, index // size] = stored[:, 0], zero[:, 0]
                scale, offset = stored[:, 0].astype(np.float32), zero[:, 0].astype(np.float32)
                over = inverse(scale)
            column = block[:, index - first]
            rounded = np.clip(np.rint(column * over + offset), 0, grid.levels)
            q[:, index] = rounded
            error = (column - scale * (rounded - offset)) / factor[index, index]
            errors[:, index - first] = error
            block[:, index - first + 1 :] -= error[:, None] * factor[index, index + 1 : last]
        weights[:, last:] -= errors @ factor[first:last, last:]
    back = np.argsort(order)
    if options.order == "activation":
        return GroupedIntegers(grid.bits, q[:, back], scales, zeros, (back // size).astype(np.int32))
    groups = back[::size] // size  # when each group was rounded
    return GroupedIntegers(grid.bits, q[:, back], scales[:, groups], zeros[:, groups])


def _order(diagonal: Floats, size: int, name: str) -> NDArray[np.intp]:
    if name == "inputs":
        return np.arange(len(diagonal))
    if name == "activation":
        return np.argsort(-diagonal, kind="stable")
    groups = diagonal.reshape(-1, size)
    inside = np.argsort(-groups, axis=1, kind="stable") + np.arange(0, len(diagonal), size)[:, None]
    return inside[np.argsort(-groups.sum(1), kind="stable")].reshape(-1)


def _inverse_factor(moments: Floats, dead: NDArray[np.bool_], damping: float) -> Floats:
    """The upper Cholesky factor of the inverse, with as much damping as it needs."""
    matrix = moments.astype(np.float64)
    index = np.arange(len(matrix))
    matrix[index[dead], index[dead]] = 1.0
    mean = float(np.mean(np.diagonal(matrix)))
    matrix[index, index] += damping * mean
    share = damping
    while True:
        try:
            inverted = np.linalg.inv(np.linalg.cholesky(matrix))
            return np.linalg.cholesky(inverted.T @ inverted).T.astype(np.float32)
        except np.linalg.LinAlgError:
            if share > MAX_DAMPING:
                raise
            more = max(share, 1e-3) * 9
            matrix[index, index] += more * mean
            share += more
