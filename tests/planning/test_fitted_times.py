"""Step times that are fitted to measured steps."""

import json
import random
import time
from collections import deque

import pytest

from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.executors.protocol import Capacity
from quire.planning.calibrate import calibration_steps, measured_steps
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


class NoExecutor:
    """Checks plans, and computes nothing."""

    def __init__(self, capacity: Capacity, seconds: float = 0.0) -> None:
        self.capacity, self.seconds, self.now = capacity, seconds, 0.0
        self.rows: set[int] = set()
        self.outputs: deque[StepOutput] = deque()

    def submit(self, plan: StepPlan) -> None:
        self.rows -= set(plan.retired)
        for admission in plan.admitted:
            assert admission.row not in self.rows, "the row is taken"
            assert max(admission.blocks) < self.capacity.num_blocks
            assert len(admission.tokens) < self.capacity.max_model_len
            self.rows.add(admission.row)
        blocks = [block for admission in plan.admitted for block in admission.blocks]
        assert len(blocks) == len(set(blocks)), "sequences share a block"
        self.outputs.append(StepOutput(plan.step, [SampledRow(run.row, [1]) for run in plan.runs]))

    def collect(self) -> StepOutput:
        self.now += self.seconds
        return self.outputs.popleft()


@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_are_measured_within_the_cache_and_the_context(ahead: int) -> None:
    capacity = Capacity(
        num_blocks=128, num_host_blocks=0, vocab_size=100, max_model_len=512, weight_bytes=0, cache_bytes=0, ahead=ahead
    )
    shapes = calibration_steps(capacity, max_num_seqs=64, max_num_batched_tokens=256, block_size=16)
    advanced: list[int] = []
    executor = NoExecutor(capacity)
    steps = measured_steps(executor, capacity, shapes, block_size=16, advance=lambda: advanced.append(1))
    sizes = {(step.work.num_tokens, step.work.num_rows) for step in steps}
    assert {(1, 1), (16, 16), (256, 1), (20, 5), (208, 17)} <= sizes and (512, 1) not in sizes
    assert max(step.work.num_read for step in steps) <= 128 * 16
    assert not executor.rows and len(advanced) == len(shapes) == len(steps)


def test_a_slow_machine_is_measured_in_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = Capacity(
        num_blocks=9000, num_host_blocks=0, vocab_size=100, max_model_len=8192, weight_bytes=0, cache_bytes=0
    )
    shapes = calibration_steps(capacity, max_num_seqs=256, max_num_batched_tokens=512, block_size=16)
    executor = NoExecutor(capacity, seconds=0.01)
    monkeypatch.setattr(time, "perf_counter", lambda: executor.now)
    steps = measured_steps(executor, capacity, shapes, block_size=16, max_seconds=0.5)
    assert 5 < len(steps) < len(shapes) and executor.now < 1.5
    assert {step.work.num_chunks for step in steps} == {0, 1}, "prompts are not among the first"
