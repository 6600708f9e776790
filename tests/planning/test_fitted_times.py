"""Step times that are fitted to measured steps."""

import json
import random

import pytest

from quire.planning.fitted_times import FittedTimes, MeasuredStep, fit, fit_quality
from quire.planning.step_times import StepWork


def seconds_of(work: StepWork) -> float:
    """Memory takes 4 ms, compute 0.1 ms a token, whichever is longer; attention adds; prompts are launched op by op."""
    base = max(0.004, 1e-4 * work.num_tokens) + (0.002 if work.num_chunks else 0)
    return base + 2e-8 * work.num_read + 1e-9 * work.num_pairs + 5e-5 * work.num_rows


def random_work(rng: random.Random) -> StepWork:
    num_tokens = rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    if rng.random() < 0.5:
        read = rng.randint(1, 40_000)
        return StepWork(num_tokens, num_tokens, read, read)
    return StepWork(num_tokens, rng.randint(1, num_tokens), rng.randint(1, 40_000), rng.randint(1, 400_000), 1)


def test_a_fit_predicts_steps_it_has_not_seen() -> None:
    rng = random.Random(0)
    steps = [MeasuredStep(work, seconds_of(work)) for work in (random_work(rng) for _ in range(150))]
    fitted = fit(steps)
    for work in (random_work(rng) for _ in range(50)):
        assert fitted.seconds(work) == pytest.approx(seconds_of(work), rel=0.02)
    assert min(fitted.per_read, fitted.per_pair, fitted.per_row) >= 0
    longer = StepWork(1024, 1, 1024, 1024 * 512, 1)  # beyond what was measured
    assert fitted.seconds(longer) == pytest.approx(seconds_of(longer), rel=0.1)
    assert FittedTimes.of(json.loads(json.dumps(fitted.as_json()))) == fitted


def test_the_quality_of_a_fit_is_its_error_for_steps_that_were_left_out() -> None:
    rng = random.Random(1)
    exact = [MeasuredStep(work, seconds_of(work)) for work in (random_work(rng) for _ in range(150))]
    noisy = [MeasuredStep(step.work, step.seconds * rng.choice((0.8, 1.2))) for step in exact]
    good, bad = fit_quality(exact), fit_quality(noisy)
    assert good.median < 0.01 < 0.1 < bad.median < bad.p95 and bad.num_steps == 150


def test_between_the_sizes_that_were_measured_a_curve_has_no_stairs() -> None:
    """Chunks of 16 and 64 tokens were timed, none between: the curve rises evenly."""
    rng = random.Random(2)
    works = [StepWork(n, 1, n, n * (n + 1) // 2, 1) for n in (16, 64, 128, 256, 512)] + [StepWork(1, 1, 50, 50)]
    steps = [MeasuredStep(work, (0.004 + 6e-4 * work.num_tokens) * rng.uniform(0.9, 1.1), count=9) for work in works]
    fitted = fit(steps)
    low, middle, high = (fitted.seconds(StepWork(n, 1, n, n * (n + 1) // 2, 1)) for n in (16, 32, 64))
    assert middle - low == pytest.approx((high - low) / 3, rel=0.35)


def test_a_step_that_stands_for_many_counts_more() -> None:
    work = StepWork(1, 1, 50, 50)
    fitted = fit([MeasuredStep(work, 0.010, count=16), MeasuredStep(work, 0.012)])
    assert fitted.seconds(work) == pytest.approx(0.010, rel=0.02)
