"""Step times that are fitted to measured steps."""

import json
import random

import pytest

from quire.ops.gpu.graph_sizes import PREFILL_GRAPH_SIZES
from quire.planning.fitted_times import DECODE_SIZES, FittedTimes, padded
from quire.planning.step_fit import MeasuredStep, fit, fit_quality
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


def seconds_of_graph(work: StepWork) -> float:
    """A GPU: graphs are stairs, a shared prefix is read by each sequence, and few sequences read slowly."""
    if work.num_chunks:
        size = padded(work.num_tokens, PREFILL_GRAPH_SIZES)
        return 0.004 + 1.5e-5 * size + 3e-8 * work.num_read + 5e-9 * work.num_pairs
    size = padded(work.num_tokens, DECODE_SIZES)
    return 0.0035 + 1e-5 * size + (1e-7 if size <= 8 else 3e-8) * work.num_read


def random_graph_work(rng: random.Random) -> StepWork:
    num_seqs, context = rng.randint(1, 100), rng.randint(50, 2000)
    read, shared = num_seqs * context, rng.choice((0, num_seqs * context // 2))
    if rng.random() < 0.5:
        return StepWork(num_seqs, num_seqs, read, read, num_shared=shared)
    chunk = rng.randint(2, 400)
    return StepWork(num_seqs + chunk, num_seqs, read + context, read + chunk * context, 1, shared)


def test_a_fit_of_a_gpu_has_the_stairs_of_its_graphs() -> None:
    rng = random.Random(3)
    works = [random_graph_work(rng) for _ in range(400)]
    fitted = fit([MeasuredStep(work, seconds_of_graph(work)) for work in works], graphs=True)
    assert fitted.shared == 1.0, "a GPU has no kernel that reads a shared prefix once"
    for work in (random_graph_work(rng) for _ in range(100)):
        assert fitted.seconds(work) == pytest.approx(seconds_of_graph(work), rel=0.03)
    assert fitted.seconds(StepWork(129, 1, 129, 0, 1)) > 1.1 * fitted.seconds(StepWork(128, 1, 128, 0, 1))
    assert FittedTimes.of(json.loads(json.dumps(fitted.as_json()))) == fitted


def test_times_of_earlier_files_are_read() -> None:
    curves = {name: {"knots": [0, 8], "seconds": [0.004, 0.012]} for name in ("decode", "prefill")}
    times = FittedTimes.of({**curves, "per_read": 1e-6, "per_pair": 1e-6, "per_row": 1e-4})
    assert times.seconds(StepWork(8, 8, 100, 100)) == pytest.approx(0.012 + 0.0008 + 0.0002)
    assert times.seconds(StepWork(8, 8, 100, 100, num_shared=50)) == pytest.approx(0.012 + 0.0008 + 0.00015)
    assert times.seconds(StepWork(8, 1, 100, 200, 1)) == pytest.approx(0.012 + 0.0001 + 0.0003)
