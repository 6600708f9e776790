"""GPTQ: weights are rounded one input after the other, and what each rounding loses is made up for by the inputs that
follow, as far as the second moments of the calibration's inputs allow (Frantar et al., 2022).

    H = X^T X + damping        U: upper Cholesky factor of H^-1
    for input i:  error = (w_i - q_i) / U_ii;  w_j -= error * U_ij for j > i

Layers are quantized in the order of the forward pass, with inputs that come out of the layers quantized before. Before
it is rounded, a layer is moved to what makes up for their errors (`made_up`), as far as these can be told from its
inputs (Arai & Ichikawa, 2025; Li et al., 2025)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from quire.quantize.integers import GroupedIntegers, IntegerGrid, ranges
from quire.quantize.plan import QuantizeError
from quire.quantize.search import Floats, inverse
from quire.quantize.threads import in_threads, spans

# What is rounded first: inputs as they are; those with the largest second moments ("activation", whose groups are then
# no runs of inputs); or the same within groups, the groups that matter most first ("group"), which stay as they are.
ORDERS = ("inputs", "activation", "group")
DEFAULT_ORDER = "group"  # costs readers nothing, and loses less than "inputs"
DEFAULT_DAMPING = 0.2
BLOCK = 64  # inputs whose errors are carried on together
MAX_DAMPING = 10.0  # times the mean of the diagonal
RIDGE = 1.0  # of `made_up`, times the mean of the diagonal: with less, other texts than the calibration's lose


@dataclass(frozen=True, slots=True)
class GPTQOptions:
    damping: float = DEFAULT_DAMPING  # of the mean of the diagonal of H
    order: str | None = None  # one of ORDERS; None: DEFAULT_ORDER
    search: bool = True  # ranges are chosen by weighted search

    @property
    def chosen_order(self) -> str:
        return self.order or DEFAULT_ORDER


@dataclass(frozen=True, slots=True, eq=False)
class RoundingOrder:
    """What layers that share their inputs share: the order in which inputs are rounded, and, in that order, the factor
    U, what an error of each input costs after later inputs have made up for it, and which inputs are always 0."""

    order: NDArray[np.intp]
    factor: Floats
    importance: Floats
    dead: NDArray[np.bool_]


def rounding_order(moments: Floats, group: int, options: GPTQOptions) -> RoundingOrder:
    """`moments` [inputs, inputs]: X^T X over the number of rows. `group`: inputs that share a scale."""
    diagonal = np.diagonal(moments).copy()
    order = input_order(diagonal, group, options.chosen_order)
    dead = (diagonal <= 0)[order]
    factor = _inverse_factor(moments[np.ix_(order, order)], dead, options.damping)
    importance: Floats = np.reciprocal(np.square(np.diagonal(factor)))
    return RoundingOrder(order, factor, importance, dead)


def made_up(w: Floats, inputs: Floats, outputs: Floats | None, moments: Floats) -> Floats:
    """Weights [outputs, inputs] whose outputs with the inputs x are nearest to those of w with the original inputs z,
    plus what the sum that they are added to has lost, s: summed over the same rows,

        inputs: (Z - X)^T X        outputs: S^T X        moments: X^T X
        w + (w inputs + outputs) (moments + ridge)^-1"""
    ridge = np.float32(RIDGE * np.mean(np.diagonal(moments)) or 1)
    inverted = np.linalg.inv(moments + ridge * np.eye(len(moments), dtype=np.float32))

    def rows(span: slice) -> Floats:
        lost = w[span] @ inputs
        moved = w[span] + (lost if outputs is None else lost + outputs[span]) @ inverted
        return moved.astype(np.float32, copy=False)

    return np.concatenate(in_threads(rows, spans(len(w))))


def gptq(w: Floats, shared: RoundingOrder, grid: IntegerGrid, options: GPTQOptions) -> GroupedIntegers:
    outputs, inputs = w.shape
    size, factor = grid.group_of(inputs), shared.factor
    step = gcd(size, BLOCK)  # a group begins with a block
    weights = np.ascontiguousarray(w.T)[shared.order]  # [inputs, outputs]: an input of all outputs is one run of memory
    weights[shared.dead] = 0
    q = np.empty((inputs, outputs), np.uint8)
    scales = np.empty((inputs // size, outputs), np.float16)
    zeros = np.empty((inputs // size, outputs), np.uint8)
    for first in range(0, inputs, step):
        last, group = first + step, first // size
        if first % size == 0:
            current = np.ascontiguousarray(weights[first : first + size].T)
            importance = shared.importance[first : first + size]
            counted = np.broadcast_to(importance, current.shape) if options.search else None
            stored, zero = ranges(current, grid, counted)
            scales[group], zeros[group] = stored[:, 0], zero[:, 0]
            scale, offset = scales[group].astype(np.float32), zeros[group].astype(np.float32)
            over = inverse(scale)
        errors = np.empty((step, outputs), np.float32)
        for index in range(first, last):
            column = weights[index]
            rounded = np.rint(column * over + offset)
            np.clip(rounded, 0, grid.levels, out=rounded)
            q[index] = rounded
            errors[index - first] = error = (column - scale * (rounded - offset)) / factor[index, index]
            weights[index + 1 : last] -= factor[index, index + 1 : last, None] * error
        weights[last:] -= factor[first:last, last:].T @ errors
    back, groups, places = original_order(shared.order, size, options.chosen_order)
    q, scales, zeros = (np.ascontiguousarray(array.T) for array in (q[back], scales[places], zeros[places]))
    return GroupedIntegers(grid.bits, q, scales, zeros, groups)


def original_order(
    order: NDArray[np.intp], size: int, name: str
) -> tuple[NDArray[np.intp], NDArray[np.int32] | None, NDArray[np.intp]]:
    """-> where each input was rounded, the group of each input if groups are no runs of inputs, and the groups in the
    order in which they are stored."""
    back = np.argsort(order)
    if name == "activation":
        return back, (back // size).astype(np.int32), np.arange(len(order) // size)
    return back, None, back[::size] // size


def input_order(diagonal: Floats, size: int, name: str) -> NDArray[np.intp]:
    if name == "inputs":
        return np.arange(len(diagonal))
    if name == "activation":
        return np.argsort(-diagonal, kind="stable")
    groups = diagonal.reshape(-1, size)
    inside = np.argsort(-groups, axis=1, kind="stable") + np.arange(0, len(diagonal), size)[:, None]
    return inside[np.argsort(-groups.sum(1), kind="stable")].reshape(-1)


def _inverse_factor(moments: Floats, dead: NDArray[np.bool_], damping: float) -> Floats:
    """U: upper triangular, U^T U is the inverse of the moments, with as much damping as that needs.

    Backwards, the moments are L L^T, and U is the inverse of L backwards."""
    matrix = moments.astype(np.float64)
    index = np.arange(len(matrix))
    matrix[index[dead], index[dead]] = 1.0
    mean = float(np.mean(np.diagonal(matrix)))
    for share in damping_shares(damping):
        matrix[index, index] += share * mean
        try:
            lower = np.linalg.cholesky(matrix[::-1, ::-1])
        except np.linalg.LinAlgError:
            continue
        del matrix  # the inverse takes three times its bytes
        return np.linalg.inv(lower)[::-1, ::-1].astype(np.float32)
    raise QuantizeError(
        "the second moments of a layer's inputs cannot be inverted",
        "use more --calibration-tokens or a larger --damping",
    )


def damping_shares(damping: float) -> Iterator[float]:
    """What is added to the diagonal, attempt after attempt, as shares of its mean."""
    yield damping
    total = damping
    while total <= MAX_DAMPING:
        more = max(total, 1e-3) * 9
        yield more
        total += more
