"""Step times that are fitted to measured steps."""

import random

import pytest

from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.executors.protocol import Capacity
from quire.planning.calibrate import measured_steps
from quire.planning.fitted_times import MeasuredStep, fit
from quire.planning.step_times import StepWork


def seconds_of(work: StepWork) -> float:
    """Memory takes 4 ms, compute 0.1 ms a token, whichever is longer; attention adds."""
    return max(0.004, 1e-4 * work.num_tokens) + 2e-8 * work.num_read + 1e-9 * work.num_pairs + 5e-5 * work.num_rows


def random_work(rng: random.Random) -> StepWork:
    num_tokens = rng.choice((1, 2, 4, 8, 16, 32, 64, 128, 256, 512))
    return StepWork(num_tokens, rng.randint(1, num_tokens), rng.randint(1, 40_000), rng.randint(1, 400_000))


def test_a_fit_predicts_steps_it_has_not_seen() -> None:
    rng = random.Random(0)
    steps = [MeasuredStep(work, seconds_of(work)) for work in (random_work(rng) for _ in range(80))]
    fitted = fit(steps)
    for work in (random_work(rng) for _ in range(50)):
        assert fitted.seconds(work) == pytest.approx(seconds_of(work), rel=0.02)
    assert min(fitted.per_read, fitted.per_pair, fitted.per_row) >= 0
    longer = StepWork(1024, 1, 1024, 1024 * 512)  # beyond what was measured
    assert fitted.seconds(longer) == pytest.approx(seconds_of(longer), rel=0.1)


class NoExecutor:
    """Checks plans, and computes nothing."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.rows: set[int] = set()

    def submit(self, plan: StepPlan) -> None:
        self.rows -= set(plan.retired)
        for admission in plan.admitted:
            assert admission.row not in self.rows, "the row is taken"
            assert max(admission.blocks) < self.capacity.num_blocks and len(admission.tokens) < 512
            self.rows.add(admission.row)
        self.output = StepOutput(plan.step, [SampledRow(run.row, [1]) for run in plan.runs])

    def collect(self) -> StepOutput:
        return self.output


def test_steps_are_measured_within_the_cache_and_the_context() -> None:
    capacity = Capacity(
        num_blocks=128, num_host_blocks=0, vocab_size=100, max_model_len=512, weight_bytes=0, cache_bytes=0
    )
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "block_size": 16}
    steps = measured_steps(NoExecutor(capacity), capacity, **limits)
    sizes = {(step.work.num_tokens, step.work.num_rows) for step in steps}
    assert {(1, 1), (16, 16), (256, 1)} <= sizes and (512, 1) not in sizes
    assert max(step.work.num_read for step in steps) <= 128 * 16
