"""Step times that are fitted to measured steps."""

import json
import random
from dataclasses import replace

import pytest

from quire.ops.gpu.graph_sizes import PREFILL_GRAPH_SIZES
from quire.planning.fitted_times import DECODE_SIZES, HOT, FittedTimes, padded, split_share
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


MOST = 22_000  # tokens a second


def seconds_of_graph(work: StepWork) -> float:
    """A GPU: graphs are stairs, a shared prefix costs 0.7 for each sequence, few sequences read slowly, the longest
    prompt takes time by itself, contexts that are split take longer, and a device that has computed MOST tokens a
    second is slower."""
    hot = min(1.0, max(0.0, (work.recent / MOST - HOT[0]) / (HOT[1] - HOT[0])))
    alone = work.num_read - work.num_chunk_read
    price = 1e-7 if work.num_rows <= 8 else 3e-8
    read = price * (alone - 0.3 * work.num_shared) + 3e-4 * split_share(work.num_rows, alone)
    if work.num_chunks:
        size = padded(work.num_tokens, PREFILL_GRAPH_SIZES)
        return 0.004 + (2.4e-5 + 3e-6 * hot) * size + read + 5e-9 * (work.num_pairs - alone) + 5e-7 * work.longest
    return 0.0035 + 1e-5 * padded(work.num_tokens, DECODE_SIZES) + read + 1e-4 * hot + 4e-9 * hot * work.num_read


def random_graph_work(rng: random.Random) -> StepWork:
    num_seqs, context, recent = rng.randint(1, 100), rng.randint(50, 2000), rng.randint(0, MOST)
    read = num_seqs * context
    work = StepWork(num_seqs, num_seqs, read, read, num_shared=rng.choice((0, read // 2)), recent=recent)
    if rng.random() < 0.5:
        return work
    work.add(rng.randint(0, 3000), rng.randint(2, 400))
    return work


def test_a_fit_of_a_gpu_has_the_stairs_of_its_graphs() -> None:
    rng = random.Random(3)
    works = [random_graph_work(rng) for _ in range(400)]
    fitted = fit([MeasuredStep(work, seconds_of_graph(work)) for work in works], graphs=True)
    assert fitted.shared == pytest.approx(0.7, abs=0.11), "some of it is found in a cache"
    for work in (random_graph_work(rng) for _ in range(100)):
        assert fitted.seconds(work) == pytest.approx(seconds_of_graph(work), rel=0.03)
    assert fitted.seconds(StepWork(129, 1, 129, 0, 1)) > 1.1 * fitted.seconds(StepWork(128, 1, 128, 0, 1))
    assert fitted.most == pytest.approx(MOST, rel=0.05)
    short, long = (fitted.seconds(StepWork(8, 8, 8 * context, 8 * context)) for context in (60, 260))
    assert long - short == pytest.approx(3e-4 + 8 * 200 * 1e-7, rel=0.15), "attention is split among programs"
    cool = StepWork(400, 1, 400, 80_000, 1, 0, 400, 400)
    assert fitted.seconds(replace(cool, recent=MOST)) > 1.05 * fitted.seconds(cool), "its clock is lower"
    assert FittedTimes.of(json.loads(json.dumps(fitted.as_json()))) == fitted


def test_times_of_earlier_files_are_read() -> None:
    curves = {name: {"knots": [0, 8], "seconds": [0.004, 0.012]} for name in ("decode", "prefill")}
    times = FittedTimes.of({**curves, "per_read": 1e-6, "per_pair": 1e-6, "per_row": 1e-4})
    assert times.seconds(StepWork(8, 8, 100, 100)) == pytest.approx(0.012 + 0.0008 + 0.0002)
    assert times.seconds(StepWork(8, 8, 100, 100, num_shared=50)) == pytest.approx(0.012 + 0.0008 + 0.00015)
    assert times.seconds(StepWork(8, 1, 100, 200, 1)) == pytest.approx(0.012 + 0.0001 + 0.0003)
