"""`quire serve` with an engine that writes down every step: what it computed, when, and how long it took.

    python -m benchmarks.step_log serve FILE SERVE_FLAGS...

So a prediction that is off can be divided: into what steps took, and what was made of them."""

import os
import struct
import sys
from bisect import bisect_right
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path

from quire.client.engine_process import EngineProcess
from quire.core.request import SequenceEvent
from quire.engine import process
from quire.engine.engine import Engine
from quire.planning.replica import Replica, num_shared_tokens
from quire.planning.step_times import StepTimes, StepWork

_STEP = struct.Struct("<6q2d")  # the numbers of a StepWork, when it began, seconds
NEIGHBOURS = 4  # steps before and after one that tell how fast the machine was


@dataclass(frozen=True, slots=True)
class LoggedStep:
    work: StepWork
    began: float  # time.perf_counter(), which all processes share
    seconds: float


class LoggedEngine(Engine):
    file = -1
    _num_shared = 0

    def _collect(self) -> list[SequenceEvent]:
        step = self._in_flight[0]
        if step.plan.admitted or step.plan.retired:
            self._num_shared = num_shared_tokens(self._scheduler)
        events = super()._collect()
        if step.plan.runs and self.record is not None:
            work = StepWork.of(step.plan, min(self.record.num_drawn, len(step.plan.runs)))
            work.num_shared = self._num_shared
            seconds = self.record.run_seconds
            os.write(self.file, _STEP.pack(*astuple(work), self._collected - seconds, seconds))
        return events


def read_steps(path: Path, since: float = 0.0) -> list[LoggedStep]:
    """Those that began after `since`."""
    data = path.read_bytes()
    rows = _STEP.iter_unpack(data[: len(data) // _STEP.size * _STEP.size])
    steps = [LoggedStep(StepWork(*row[:6]), row[6], row[7]) for row in rows]
    return [step for step in steps if step.began >= since]


class ObservedTimes:
    """Times of a model, times what steps of a real run took longer than it says at the same moment."""

    def __init__(self, model: StepTimes, steps: list[LoggedStep], begin: float) -> None:
        """`begin`: the run's second 0, as time.perf_counter()."""
        self.replica: Replica | None = None  # whose clock it is
        self._model = model
        self._moments = [step.began - begin for step in steps]
        real = [0.0, *accumulate(step.seconds for step in steps)]
        said = [0.0, *accumulate(model.seconds(step.work) for step in steps)]
        bounds = [(max(0, i - NEIGHBOURS), min(len(steps), i + NEIGHBOURS + 1)) for i in range(len(steps))]
        self._factors = [(real[end] - real[start]) / (said[end] - said[start]) for start, end in bounds]

    def seconds(self, work: StepWork) -> float:
        assert self.replica is not None
        index = bisect_right(self._moments, self.replica.clock) - 1
        return self._factors[max(index, 0)] * self._model.seconds(work)


def main() -> None:
    if sys.argv[1] == "serve":
        from quire.cli.main import main as quire

        EngineProcess.program = ("-m", "benchmarks.step_log", "engine", sys.argv[2])
        sys.argv = ["quire", "serve", *sys.argv[3:]]
        sys.exit(quire())
    LoggedEngine.file = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    process.Engine = LoggedEngine  # type: ignore[misc]
    sys.exit(process.main(int(sys.argv[3]), int(sys.argv[4])))


if __name__ == "__main__":
    main()
