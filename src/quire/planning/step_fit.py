"""Step times, fitted to steps that ran here."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quire.ops.gpu.graph_sizes import PREFILL_GRAPH_SIZES
from quire.planning.fitted_times import (
    DECODE_SIZES,
    Curve,
    FittedTimes,
    hotness,
    padded,
    read_alone,
    size_of,
    split_share,
)
from quire.planning.least_squares import solve_non_negative
from quire.planning.step_times import StepWork

KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens of a step
READ_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # tokens of a GPU's step that only decodes
NUM_OTHERS = 9  # prices beside those of curves: a cached token, a pair, a row, and six of a GPU
HELD_OUT = 5  # every fifth step tells how good a fit is
SMOOTH = 0.3  # weight of how much a curve's slope changes at a knot, beside a measured step's of 1
# Cached tokens and pairs that are taken to cost little beside a step, unless steps tell: few contexts tell nothing.
FEW_READ, FEW_PAIRS, FEW_LONGEST = 1000, 3000, 300
ALIKE = 2.0  # the same, of prices of a cached token at neighbouring knots
CONTEXT = 500  # cached tokens of a sequence, for which these prices are compared
MAX_COUNT = 16  # steps that count, of those that one stands for
PASSES = 3  # each takes errors as shares of what the one before predicts: a share of what was measured favours the fast
MAX_ERROR = 0.3  # of a step: beyond it something else ran, and it counts less
MOST = 98  # percentile
SHARES = tuple(round(0.1 * tenth, 1) for tenth in range(11))  # that a shared cached token may cost
SHARE_WEIGHT = 1.0  # of how far it is from what is expected of the kernels
CPU_SHARE, GPU_SHARE = 0.4, 0.7  # a CPU reads a shared prefix once for all; a GPU finds some of it in its cache


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that ran here, or the mean of several that are alike."""

    work: StepWork
    seconds: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Relative errors for steps that were left out of a fit."""

    median: float
    p95: float
    num_steps: int  # measured


def fit(steps: Sequence[MeasuredStep], graphs: bool = False) -> FittedTimes:
    """Least squares of relative errors, with no negative coefficient. Between knots that few steps tell of, the curves
    change their slope as little as the steps allow. `graphs`: steps are padded to the sizes of CUDA graphs."""
    expected = GPU_SHARE if graphs else CPU_SHARE
    if not any(step.work.num_shared for step in steps):
        return _Fit(steps, graphs, expected).times
    fits = [_Fit(steps, graphs, share) for share in SHARES]
    return min(fits, key=lambda each: each.squares + SHARE_WEIGHT * (each.times.shared - expected) ** 2).times


def fit_quality(steps: Sequence[MeasuredStep], graphs: bool = False) -> FitQuality:
    """How well a fit to four steps in five predicts the fifth."""
    errors, shared = [], fit(steps, graphs).shared
    for first in range(HELD_OUT):
        held_out = steps[first::HELD_OUT]
        others = [step for number, step in enumerate(steps) if number % HELD_OUT != first]
        fitted = _Fit(others, graphs, shared).times
        errors += [abs(fitted.seconds(step.work) / step.seconds - 1) for step in held_out]
    num_steps = sum(step.count for step in steps)
    return FitQuality(float(np.percentile(errors, 50)), float(np.percentile(errors, 95)), num_steps)


class _Fit:
    """Columns: the rises of both curves, one a knot; prices of a cached token, one a knot; prices of steps with
    prompts. A rise is not negative."""

    def __init__(self, steps: Sequence[MeasuredStep], graphs: bool, shared: float) -> None:
        self._graphs, self._shared = graphs, shared
        self._most = _most_tokens(steps) if graphs else 0.0
        decodes = [step for step in steps if not step.work.num_chunks]
        self._decode = self._knots(decodes, DECODE_SIZES)
        self._prefill = self._knots([step for step in steps if step.work.num_chunks], PREFILL_GRAPH_SIZES)
        most = max((size_of(step.work, graphs) for step in decodes), default=1)
        self._read = [knot for knot in READ_KNOTS if knot <= max(2, most)] if graphs else [1, 2]
        self._others = len(self._decode) + len(self._prefill) + len(self._read)  # the first of the other prices
        self._width = self._others + NUM_OTHERS
        columns = np.array([self._features(step.work) for step in steps])
        measured = np.array([step.seconds for step in steps])
        counts = np.sqrt([min(step.count, MAX_COUNT) for step in steps])
        near = [(size_of(step.work, graphs), step.seconds) for step in steps]
        said, weights = measured, counts
        for _ in range(PASSES):
            penalties = np.vstack([*self._bends(near), *self._alike(near), *self._little(measured)])
            rows = np.vstack([columns * (weights / said)[:, None], penalties])
            solution = solve_non_negative(rows, np.concatenate([weights * measured / said, np.zeros(len(penalties))]))
            said = np.maximum(columns @ solution, 1e-6)
            errors = np.abs(measured / said - 1)
            weights = counts * np.minimum(1.0, MAX_ERROR / np.maximum(errors, 1e-9))
        self.squares = float(np.sum((weights * (measured / said - 1)) ** 2))
        self.times = self._times(solution)

    def _times(self, solution: np.ndarray) -> FittedTimes:
        first, second, others = len(self._decode), len(self._decode) + len(self._prefill), self._others
        decode, prefill = (
            _curve(knots, np.cumsum(rises))
            for knots, rises in ((self._decode, solution[:first]), (self._prefill, solution[first:second]))
        )
        per_read, per_pair, per_row, longest, mixed, *of_gpu = map(float, solution[others:])
        read = _curve(self._read, solution[second:others])
        return FittedTimes(
            decode, prefill, read, per_read, per_pair, per_row, self._shared, self._graphs, longest, mixed, self._most,
            *of_gpu,
        )  # fmt: skip

    def _knots(self, steps: Sequence[MeasuredStep], sizes: Sequence[int]) -> list[int]:
        most = max((size_of(step.work, self._graphs) for step in steps), default=1)
        return [0, *(knot for knot in (sizes if self._graphs else KNOTS) if 0 < knot < most), most]

    def _features(self, work: StepWork) -> list[float]:
        """Each knot's column is how far the step goes into the interval that ends there: its coefficient is the rise of
        the curve over that interval."""
        columns: list[float] = []
        share = self._shared if self._graphs or not work.num_chunks else 0.0  # as in `FittedTimes.num_read`
        tokens, read = size_of(work, self._graphs), work.num_read - (1 - share) * work.num_shared
        for knots, used in ((self._decode, not work.num_chunks), (self._prefill, work.num_chunks)):
            columns.append(1.0 if used else 0.0)
            for left, right in pairwise(knots):
                into = min(1.0, max(0.0, (tokens - left) / (right - left)))
                columns.append(into if used else 0.0)
        hot = hotness(work, self._most)
        if work.num_chunks and self._graphs:
            alone, read = read_alone(work, self._shared)
            attention = work.num_chunk_read, work.num_pairs - alone, work.num_rows, work.longest, float(alone > 0)
            hats = (read * hat for hat in _hats(padded(work.num_rows, DECODE_SIZES), self._read))
            return [*columns, *hats, *attention, tokens * hot, 0.0, 0.0, split_share(work.num_rows, alone)]
        if work.num_chunks:
            return [*columns, *[0.0] * len(self._read), read, work.num_pairs, work.num_rows, *[0.0] * 6]
        hats = (read * hat for hat in _hats(tokens, self._read))
        of_gpu = (hot, read * hot, split_share(work.num_rows, work.num_read)) if self._graphs else (0.0, 0.0, 0.0)
        return [*columns, *hats, *[0.0] * 6, *of_gpu]

    def _bends(self, near: Sequence[tuple[int, float]]) -> list[np.ndarray]:
        """Rows that say how much the slopes change at each knot, as a share of the seconds there."""
        rows = []
        for knots, first in ((self._decode, 0), (self._prefill, len(self._decode))):
            for number in range(1, len(knots) - 1):
                left, knot, right = knots[number - 1 : number + 2]
                scale = SMOOTH * min(knot - left, right - knot) / _seconds_near(near, knot)
                row = np.zeros(self._width)
                row[first + number] = -scale / (knot - left)
                row[first + number + 1] = scale / (right - knot)
                rows.append(row)
        return rows

    def _alike(self, near: Sequence[tuple[int, float]]) -> list[np.ndarray]:
        """Rows that say how far the prices of a cached token are apart: at neighbouring knots, and on a CPU in steps
        with prompts beside those of as many sequences."""
        rows, first = [], len(self._decode) + len(self._prefill)
        for number, knot in enumerate(self._read[:-1] if self._graphs else self._read):
            scale = ALIKE * CONTEXT * knot / _seconds_near(near, knot)
            row = np.zeros(self._width)
            row[first + number] = -scale
            row[first + number + 1] = scale  # of the next knot; of the last, that of steps with prompts
            rows.append(row)
        return rows

    def _little(self, measured: np.ndarray) -> list[np.ndarray]:
        """Rows that say what attention adds, as a share of a typical step."""
        rows, typical = np.zeros((3, self._width)), float(np.median(measured))
        for number, (column, few) in enumerate(((0, FEW_READ), (1, FEW_PAIRS), (3, FEW_LONGEST))):
            rows[number, self._others + column] = few / typical
        return list(rows)


def _most_tokens(steps: Sequence[MeasuredStep]) -> float:
    """A second, of steps with prompts: nearly the most that were computed."""
    rates = [step.work.num_tokens / step.seconds for step in steps if step.work.num_chunks]
    return float(np.percentile(rates, MOST)) if rates else 0.0


def _curve(knots: Sequence[int], seconds: np.ndarray) -> Curve:
    return Curve(tuple(map(float, knots)), tuple(map(float, seconds)))


def _seconds_near(near: Sequence[tuple[int, float]], tokens: int) -> float:
    return min(near, key=lambda each: abs(each[0] - tokens))[1]


def _hats(tokens: float, knots: Sequence[int]) -> list[float]:
    """How much each knot counts for a value between two of them."""
    place = float(np.interp(tokens, knots, range(len(knots))))
    return [max(0.0, 1 - abs(place - number)) for number in range(len(knots))]
