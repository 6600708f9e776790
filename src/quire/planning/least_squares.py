"""Least squares without negative coefficients."""

from collections.abc import Sequence

import numpy as np


def non_negative_least_squares(a: Sequence[Sequence[float]], b: Sequence[float]) -> list[float]:
    return [float(value) for value in solve_non_negative(np.array(a), np.array(b))]


def fit_usual(rows: Sequence[Sequence[float]], values: Sequence[float], passes: int = 5) -> list[float]:
    """Coefficients that are not negative, of which most rows tell: one that is far off counts less."""
    a, b = np.array(rows, float), np.array(values)
    weights, solution = np.ones(len(b)), np.zeros(a.shape[1])
    for _ in range(passes):
        solution = solve_non_negative(a * weights[:, None], b * weights)
        errors = np.abs(b - a @ solution)
        usual = max(1e-12, 3 * float(np.median(errors)))
        weights = 1 / np.sqrt(1 + (errors / usual) ** 2)
    return [float(value) for value in solution]


def solve_non_negative(a: np.ndarray, b: np.ndarray, rounds: int = 200) -> np.ndarray:
    """Lawson and Hanson's active set."""
    if len(a) > a.shape[1]:  # as many equations as unknowns have the same solution
        q, a = np.linalg.qr(a)
        b = q.T @ b
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
