"""Step times of this machine, fitted to steps that it ran: seconds by number of tokens, and what attention adds."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from quire.planning.step_times import StepWork

KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens of a step
HELD_OUT = 5  # every fifth step tells how good a fit is
SMOOTH = 0.3  # weight of how much a curve's slope changes at a knot, beside a measured step's of 1
# Cached tokens and pairs that are taken to cost little beside a step, unless steps tell: few contexts tell nothing.
FEW_READ, FEW_PAIRS = 1000, 10_000
MAX_COUNT = 16  # steps that count, of those that one stands for


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that ran here, or the mean of several that are alike."""

    work: StepWork
    seconds: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class Curve:
    """Linear between knots, and beyond the last."""

    knots: tuple[float, ...]  # tokens
    seconds: tuple[float, ...]  # of each knot

    def at(self, tokens: float) -> float:
        knots, seconds = self.knots, self.seconds
        i = min(max(bisect_left(knots, tokens), 1), len(knots) - 1)
        low, left = seconds[i - 1], knots[i - 1]
        return low + (seconds[i] - low) * (tokens - left) / (knots[i] - left)


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Piecewise linear in the number of tokens, since few tokens are bound by memory and many by compute; linear in
    the cached tokens that are read, in pairs of queries and keys, and in sampled rows. Steps that only decode have a
    curve of their own: on a GPU they replay graphs."""

    decode: Curve
    prefill: Curve
    per_read: float
    per_pair: float
    per_row: float

    def seconds(self, work: StepWork) -> float:
        base = (self.prefill if work.num_chunks else self.decode).at(work.num_tokens)
        read = work.num_read - work.num_shared
        extra = self.per_read * read + self.per_pair * work.num_pairs + self.per_row * work.num_rows
        return max(1e-6, base + extra)

    def scaled(self, factor: float) -> "FittedTimes":
        decode, prefill = (
            Curve(curve.knots, tuple(factor * seconds for seconds in curve.seconds))
            for curve in (self.decode, self.prefill)
        )
        return FittedTimes(decode, prefill, factor * self.per_read, factor * self.per_pair, factor * self.per_row)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "FittedTimes":
        """What `as_json` gave."""
        decode, prefill = (
            Curve(tuple(map(float, values[name]["knots"])), tuple(map(float, values[name]["seconds"])))
            for name in ("decode", "prefill")
        )
        per_read, per_pair, per_row = (float(values[name]) for name in ("per_read", "per_pair", "per_row"))
        return cls(decode, prefill, per_read, per_pair, per_row)


@dataclass(frozen=True, slots=True)
class FitQuality:
    """Relative errors for steps that were left out of a fit."""

    median: float
    p95: float
    num_steps: int  # measured


def fit(steps: Sequence[MeasuredStep]) -> FittedTimes:
    """Least squares of relative errors, with no negative coefficient. Between knots that few steps tell of, the curves
    change their slope as little as the steps allow."""
    decode = _knots([step for step in steps if not step.work.num_chunks])
    prefill = _knots([step for step in steps if step.work.num_chunks])
    columns = np.array([_features(step.work, decode, prefill) for step in steps])
    weights = np.sqrt([min(step.count, MAX_COUNT) for step in steps])
    rows = columns * (weights / [step.seconds for step in steps])[:, None]
    width = columns.shape[1]
    bends = [*_bends(decode, 0, steps, width), *_bends(prefill, len(decode), steps, width), *_little(steps, width)]
    solution = _non_negative_least_squares(np.vstack([rows, *bends]), np.concatenate([weights, np.zeros(len(bends))]))
    per_read, per_pair, per_row = map(float, solution[-3:])
    rises = solution[: len(decode)], solution[len(decode) : -3]
    curves = (
        Curve(tuple(map(float, knots)), tuple(map(float, np.cumsum(rise))))
        for knots, rise in zip((decode, prefill), rises, strict=True)
    )
    return FittedTimes(next(curves), next(curves), per_read, per_pair, per_row)


def fit_quality(steps: Sequence[MeasuredStep]) -> FitQuality:
    """How well a fit to four steps in five predicts the fifth."""
    errors = []
    for first in range(HELD_OUT):
        held_out = steps[first::HELD_OUT]
        fitted = fit([step for number, step in enumerate(steps) if number % HELD_OUT != first])
        errors += [abs(fitted.seconds(step.work) / step.seconds - 1) for step in held_out]
    num_steps = sum(step.count for step in steps)
    return FitQuality(float(np.percentile(errors, 50)), float(np.percentile(errors, 95)), num_steps)


def _bends(knots: Sequence[int], first: int, steps: Sequence[MeasuredStep], num_columns: int) -> list[np.ndarray]:
    """Rows that say how much the slope changes at each knot, as a share of the seconds there. `first`: the column of
    the first knot."""
    rows = []
    for number in range(1, len(knots) - 1):
        left, knot, right = knots[number - 1 : number + 2]
        near = min(steps, key=lambda step: abs(step.work.num_tokens - knot))
        scale = SMOOTH * min(knot - left, right - knot) / near.seconds
        row = np.zeros(num_columns)
        row[first + number] = -scale / (knot - left)
        row[first + number + 1] = scale / (right - knot)
        rows.append(row)
    return rows


def _little(steps: Sequence[MeasuredStep], num_columns: int) -> list[np.ndarray]:
    """Rows that say what attention adds, as a share of a typical step."""
    rows, typical = np.zeros((2, num_columns)), float(np.median([step.seconds for step in steps]))
    rows[0, -3], rows[1, -2] = FEW_READ / typical, FEW_PAIRS / typical
    return list(rows)


def _knots(steps: Sequence[MeasuredStep]) -> list[int]:
    most = max((step.work.num_tokens for step in steps), default=1)
    return [knot for knot in KNOTS if knot < most] + [most]


def _features(work: StepWork, decode: Sequence[int], prefill: Sequence[int]) -> list[float]:
    """Each knot's column is how far the step goes into the interval that ends there: its coefficient is the rise of
    the curve over that interval, which is not negative."""
    columns: list[float] = []
    for knots, used in ((decode, not work.num_chunks), (prefill, work.num_chunks)):
        columns.append(1.0 if used else 0.0)
        for left, right in pairwise(knots):
            into = min(1.0, max(0.0, (work.num_tokens - left) / (right - left)))
            columns.append(into if used else 0.0)
    return [*columns, work.num_read - work.num_shared, work.num_pairs, work.num_rows]


def non_negative_least_squares(a: Sequence[Sequence[float]], b: Sequence[float]) -> list[float]:
    return [float(value) for value in _non_negative_least_squares(np.array(a), np.array(b))]


def _non_negative_least_squares(a: np.ndarray, b: np.ndarray, rounds: int = 100) -> np.ndarray:
    """Lawson and Hanson's active set."""
    scale = np.linalg.norm(a, axis=0)
    a = a / np.where(scale == 0, 1, scale)
    x, passive = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(rounds):
        gradient = a.T @ (b - a @ x)
        gradient[passive] = -np.inf
        if gradient.max() <= 1e-12:
            break
        passive[gradient.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            if trial[passive].min() > 0:
                x = trial
                break
            blocked = passive & (trial <= 0)
            step = np.min(x[blocked] / (x[blocked] - trial[blocked]))
            x = x + step * (trial - x)
            passive &= x > 1e-15
            x[~passive] = 0
            if not passive.any():
                break
    return x / np.where(scale == 0, 1, scale)
