"""Steps of a model, run on this machine and timed, so that step times can be fitted to them."""

import time
from collections.abc import Iterator

from quire.core.params import SamplingParams
from quire.core.plan import Admission, Run, StepPlan
from quire.executors.protocol import Capacity, Executor
from quire.planning.fitted_times import MeasuredStep
from quire.planning.step_times import StepWork

DECODE_SEQS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CONTEXTS = (64, 512, 2048)  # tokens before the step
MAX_SECONDS = 20.0  # of all steps
REPEATS = 3


def measured_steps(
    executor: Executor, capacity: Capacity, *, max_num_seqs: int, max_num_batched_tokens: int, block_size: int
) -> list[MeasuredStep]:  # fmt: skip
    """Decode steps of several sizes and prefill chunks, behind contexts of several lengths. What is in the cache does
    not matter for the time, so nothing is computed before."""
    shapes = [
        *((num_seqs, 1, context) for num_seqs in DECODE_SEQS if num_seqs <= max_num_seqs for context in CONTEXTS),
        *((1, chunk, start) for chunk in CHUNKS if chunk <= max_num_batched_tokens for start in (0, *CONTEXTS[1:])),
    ]
    room = capacity.num_blocks * block_size
    shapes = [
        (num_seqs, count, start)
        for num_seqs, count, start in shapes
        if start + count < capacity.max_model_len and num_seqs * (start + count + block_size) <= room
    ]
    began, steps, numbers = time.perf_counter(), [], iter(range(1 << 30))
    for num_seqs, count, start in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        for repeat in range(REPEATS):
            if repeat and time.perf_counter() - began > MAX_SECONDS:
                break
            steps.append(_measure(executor, numbers, num_seqs, count, start, block_size))
    return _fastest(steps)


def _measure(
    executor: Executor, numbers: Iterator[int], num_seqs: int, count: int, start: int, block_size: int
) -> MeasuredStep:
    plan = StepPlan(next(numbers), [])
    num_blocks = -(-(start + count) // block_size)
    for row in range(num_seqs):
        blocks = list(range(row * num_blocks, (row + 1) * num_blocks))
        tokens = [1 + (row + i) % 100 for i in range(start + count)]
        params = SamplingParams(max_tokens=2, seed=row)
        plan.admitted.append(Admission(row, params, 0, tokens, start + count, blocks, []))
        plan.runs.append(Run(row, start, count))
    began = time.perf_counter()
    executor.submit(plan)
    executor.collect()
    seconds = time.perf_counter() - began
    executor.submit(StepPlan(next(numbers), [], retired=list(range(num_seqs))))
    executor.collect()
    return MeasuredStep(StepWork.of(plan, num_seqs), seconds)


def _fastest(steps: list[MeasuredStep]) -> list[MeasuredStep]:
    """Of the repetitions of each step."""
    best: dict[tuple[int, ...], MeasuredStep] = {}
    for step in steps:
        work = step.work
        key = (work.num_tokens, work.num_rows, work.num_read, work.num_pairs)
        if key not in best or step.seconds < best[key].seconds:
            best[key] = step
    return list(best.values())
