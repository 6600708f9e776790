"""Steps of a model, run on this machine and timed, so that step times can be fitted to them."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from statistics import median

from quire.core.params import SamplingParams
from quire.core.plan import Admission, Run, StepPlan
from quire.executors.protocol import Capacity, Executor
from quire.planning.fitted_times import MeasuredStep
from quire.planning.step_times import StepWork

# Sequences that decode, and tokens of a chunk: the first of each list are measured first, on a slow machine alone.
DECODE_SEQS = (1, 8, 32, 4, 16, 64, 2, 128, 256, 3, 6, 12, 24, 48)
CONTEXTS = (32, 1024)  # tokens before a decode step
CHUNKS = (16, 128, 512, 64, 256, 32, 1024, 2048, 4096, 8192)
STARTS = (0, 1024, 3072)  # of a chunk
MIXED = ((4, 64), (16, 192), (1, 448), (64, 64), (4, 192), (16, 16), (16, 448), (1, 64), (64, 192), (64, 448), (4, 16))
MAX_SECONDS = 14.0  # of all steps
WARM_UP_SECONDS = 6.0  # of these, on a GPU
MAX_ROUNDS = 6
NUM_STEPS = 5  # of decoding, each time


@dataclass(frozen=True, slots=True)
class CalibrationStep:
    """`num_seqs` decode behind `context` tokens; beside them a chunk of a prompt, if any, from `start` on."""

    num_seqs: int = 0
    context: int = 0
    chunk: int = 0
    start: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_seqs + self.chunk

    @property
    def num_steps(self) -> int:
        """Plans until it is measured once: a chunk stands between steps of decoding."""
        return 1 + NUM_STEPS if not self.chunk else 3 if self.num_seqs else 1

    @property
    def longest(self) -> int:
        return max(self.context + self.num_steps, self.start + self.chunk + 1)

    def num_blocks(self, block_size: int) -> int:
        each = -(-(self.context + self.num_steps) // block_size) if self.num_seqs else 0
        return self.num_seqs * each - (-(self.start + self.chunk) // block_size)


def calibration_steps(
    capacity: Capacity, *, max_num_seqs: int, max_num_batched_tokens: int, block_size: int
) -> list[CalibrationStep]:
    """Those that fit, the most telling first."""
    rounds = zip_longest(
        [CalibrationStep(num_seqs, CONTEXTS[0]) for num_seqs in DECODE_SEQS],
        [CalibrationStep(num_seqs, CONTEXTS[1]) for num_seqs in DECODE_SEQS],
        *([CalibrationStep(chunk=chunk, start=start) for chunk in CHUNKS] for start in STARTS),
        *(
            [CalibrationStep(seqs, context, chunk, context - CONTEXTS[0]) for seqs, chunk in MIXED]
            for context in CONTEXTS
        ),
    )
    return [
        shape
        for shape in chain.from_iterable(rounds)
        if shape is not None
        and shape.num_tokens <= max_num_batched_tokens
        and shape.num_seqs + bool(shape.chunk) <= max_num_seqs
        and shape.longest < capacity.max_model_len
        and shape.num_blocks(block_size) <= capacity.num_blocks
    ]


def measured_steps(
    executor: Executor, capacity: Capacity, shapes: list[CalibrationStep], *, block_size: int,
    max_seconds: float = MAX_SECONDS, advance: Callable[[], object] = lambda: None,
) -> list[MeasuredStep]:  # fmt: skip
    """The median of each shape. What is in the cache does not matter for the time, so contexts are not computed.

    After the first round long steps follow one another, as they do when a server is busy: a GPU lowers its clock."""
    times: dict[CalibrationStep, list[tuple[StepWork, float]]] = defaultdict(list)
    timer = _Timer(executor, capacity.ahead, block_size)
    began, slowest = time.perf_counter(), 0.0  # seconds a token, of the last prompt
    if capacity.ahead:
        shapes = _warm_up(timer, shapes)
    for number in range(MAX_ROUNDS):
        for shape in sorted(shapes, key=lambda shape: shape.num_tokens) if number else shapes:
            now = time.perf_counter()
            left = max_seconds - (now - began)
            if left < 0 or (number and left < slowest * shape.num_tokens * shape.num_steps):
                continue
            times[shape] += timer.run(shape)
            if shape.num_tokens >= CHUNKS[0]:
                slowest = (time.perf_counter() - now) / shape.num_steps / shape.num_tokens
            if number == 0:
                advance()
    return [_median(times[shape]) for shape in shapes if shape in times]


def _warm_up(timer: "_Timer", shapes: list[CalibrationStep]) -> list[CalibrationStep]:
    """Run each once, since a GPU's first step of a shape may compile kernels. -> those that the time sufficed for"""
    began, warm = time.perf_counter(), []
    for shape in shapes:
        if time.perf_counter() - began > WARM_UP_SECONDS:
            break
        timer.run(shape)
        warm.append(shape)
    return warm


def _median(measured: list[tuple[StepWork, float]]) -> MeasuredStep:
    work = sorted(measured, key=lambda pair: pair[1])[len(measured) // 2][0]
    return MeasuredStep(work, median(seconds for _, seconds in measured))


class _Timer:
    """Drives an executor as the engine does, and times steps as the engine does."""

    def __init__(self, executor: Executor, ahead: int, block_size: int) -> None:
        self._executor, self._ahead, self._block_size = executor, ahead, block_size
        self._step = 0

    def run(self, shape: CalibrationStep) -> list[tuple[StepWork, float]]:
        """What it computed and how long it took, each time."""
        in_flight: deque[tuple[bool, StepWork, float]] = deque()
        measured, collected = [], 0.0

        def collect() -> None:
            nonlocal collected
            timed, work, submitted = in_flight.popleft()
            self._executor.collect()
            now = time.perf_counter()
            if timed:
                measured.append((work, now - max(submitted, collected)))
            collected = now

        for timed, plan in self._plans(shape):
            in_flight.append((timed, StepWork.of(plan, len(plan.runs)), time.perf_counter()))
            self._executor.submit(plan)
            if len(in_flight) > self._ahead:
                collect()
        while in_flight:
            collect()
        return measured

    def _plans(self, shape: CalibrationStep) -> Iterator[tuple[bool, StepPlan]]:
        """-> whether it is to be timed, and the plan."""
        rows, size = range(shape.num_seqs), self._block_size
        each = -(-(shape.context + shape.num_steps) // size)  # blocks of a sequence that decodes

        def decode(step: int) -> list[Run]:
            return [Run(row, shape.context - 1 + step, 1) for row in rows]

        if rows:
            plan = self._plan(decode(0))
            plan.admitted = [_admission(row, shape.context, range(row * each, (row + 1) * each)) for row in rows]
            yield False, plan
        retired = list(rows)
        if shape.chunk:
            row, end = shape.num_seqs, shape.start + shape.chunk
            plan = self._plan([*decode(1), Run(row, shape.start, shape.chunk)])
            first = row * each
            plan.admitted = [_admission(row, end, range(first, first - (-end // size)))]
            yield True, plan
            retired.append(row)
            if rows:  # on a GPU it is timed until the next step
                yield False, self._plan(decode(2))
        else:
            for step in range(1, NUM_STEPS + 1):
                yield True, self._plan(decode(step))
        plan = self._plan([])
        plan.retired = retired
        yield False, plan

    def _plan(self, runs: list[Run]) -> StepPlan:
        return StepPlan(self._next(), runs)

    def _next(self) -> int:
        self._step += 1
        return self._step


def _admission(row: int, num_tokens: int, blocks: range) -> Admission:
    params = SamplingParams(max_tokens=2, seed=row, temperature=0)
    tokens = [1 + (row + i) % 100 for i in range(num_tokens)]
    return Admission(row, params, 0, tokens, num_tokens, list(blocks), [])
