"""Step times of this machine, fitted to steps that it ran: seconds by number of tokens, and what attention adds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from quire.planning.step_times import StepWork

KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens of a step


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that ran here."""

    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Piecewise linear in the number of tokens, since few tokens are bound by memory and many by compute; linear in
    the cached tokens that are read, in pairs of queries and keys, and in sampled rows."""

    knots: tuple[float, ...]  # tokens
    seconds_at: tuple[float, ...]  # of each knot
    per_read: float
    per_pair: float
    per_row: float

    def seconds(self, work: StepWork) -> float:
        base = _interpolate(self.knots, self.seconds_at, work.num_tokens)
        extra = self.per_read * work.num_read + self.per_pair * work.num_pairs + self.per_row * work.num_rows
        return max(1e-6, base + extra)


def _interpolate(knots: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear between knots, and beyond the last."""
    for (left, low), (right, high) in pairwise(zip(knots, values, strict=True)):
        if at <= right:
            return low + (high - low) * (at - left) / (right - left)
    slope = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
    return values[-1] + slope * (at - knots[-1])


def fit(steps: Sequence[MeasuredStep]) -> FittedTimes:
    """Least squares of relative errors, with no negative coefficient."""
    most = max(step.work.num_tokens for step in steps)
    knots = [knot for knot in KNOTS if knot < most] + [most]
    columns = np.array([_features(step.work, knots) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    solution = _non_negative_least_squares(columns / seconds[:, None], np.ones(len(steps)))
    rises, (per_read, per_pair, per_row) = solution[: len(knots)], solution[len(knots) :]
    return FittedTimes(
        tuple(map(float, knots)), tuple(map(float, np.cumsum(rises))), float(per_read), float(per_pair), float(per_row)
    )


def _features(work: StepWork, knots: Sequence[int]) -> list[float]:
    """Each knot's column is how far the step goes into the interval that ends there: its coefficient is the rise of
    the curve over that interval, which is not negative."""
    into = [1.0]
    for left, right in pairwise(knots):
        into.append(min(1.0, max(0.0, (work.num_tokens - left) / (right - left))))
    return [*into, work.num_read, work.num_pairs, work.num_rows]


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
