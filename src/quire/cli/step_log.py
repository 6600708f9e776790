"""`quire serve` with an engine that writes down every step: what it computed, when, and how long it took. Its server
writes down what it did with messages of the engine, in FILE.server.

    python -m quire.cli.step_log serve FILE SERVE_FLAGS...

Calibration fits times to these steps; a prediction that is off is divided by them into what steps took, and what was
made of them."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from quire.client import engine_client
from quire.client.engine_process import EngineProcess
from quire.client.inflight import InFlight
from quire.client.requests_in_flight import RequestsInFlight
from quire.client.service import TokenGap
from quire.core.plan import StepOutput
from quire.core.records import StepRecord
from quire.core.request import Request, SequenceEvent
from quire.engine import process
from quire.engine.engine import Engine


class LoggedEngine(Engine):
    file = -1
    _num_shared = 0
    _num_new = 0
    _waited = 0.0
    _on_device = 0.0

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        if self.capacity.ahead:
            self._time_device()
            self._time_waits()

    def _time_device(self) -> None:
        executor: Any = self.executor
        executor.runner.is_timed, collect = True, executor.collect

        def timed() -> StepOutput:
            output: StepOutput = collect()
            self._on_device = output.device_seconds
            return output

        executor.collect = timed

    def _time_waits(self) -> None:
        """Of the loop, for what the device sampled."""
        from quire.ops.gpu.sampling import sampler

        module: Any = sampler
        begin_copy = module.to_host

        def to_host(*tensors: Any) -> Callable[[], Any]:
            arrive = begin_copy(*tensors)

            def timed() -> Any:
                began = time.perf_counter()
                copies = arrive()
                self._waited += time.perf_counter() - began
                return copies

            return timed

        module.to_host = to_host

    def submit(self, request: Request) -> None:
        self._num_new += self._scheduler.has_work
        super().submit(request)

    def _collect(self) -> list[SequenceEvent]:
        from quire.planning.replica import num_shared_tokens
        from quire.planning.step_log import LoggedStep
        from quire.planning.step_times import StepWork

        step = self._in_flight[0]
        if step.plan.admitted or step.plan.retired:
            self._num_shared = num_shared_tokens(self._scheduler)
        self._waited = 0.0
        events = super()._collect()
        if step.plan.runs and self.record is not None:
            work = StepWork.of(step.plan, min(self.record.num_drawn, len(step.plan.runs)))
            work.num_shared = self._num_shared
            seconds = self.record.run_seconds
            counts = self._num_new, len(step.plan.admitted), sum(event.final for event in events)
            goes_on = self._scheduler.has_work
            began = self._collected - seconds
            logged = LoggedStep(work, began, seconds, goes_on, *counts, self._waited, self._on_device)
            self._num_new = 0
            os.write(self.file, logged.packed())
        return events


class LoggedRequests(RequestsInFlight):
    file = -1
    _began = 0.0  # 0: nothing has come since clients were told
    _num_messages = 0
    _num_tokens = 0

    def _begin(self, num_tokens: int) -> None:
        self._began = self._began or time.perf_counter()
        self._num_tokens += num_tokens

    def push_tokens(self, tokens: dict[str, list[int]]) -> list[TokenGap]:
        self._begin(len(tokens))
        return super().push_tokens(tokens)

    def gaining(self, request_id: str) -> InFlight | None:
        self._begin(1)
        return super().gaining(request_id)

    def record_step(self, record: StepRecord) -> None:
        self._begin(0)
        self._num_messages += 1
        super().record_step(record)

    def tell_consumers(self) -> None:
        from quire.planning.step_log import Told

        num_writes = len(self._changed)
        super().tell_consumers()
        if self._num_messages:
            seconds = time.perf_counter() - self._began
            told = Told(self._began, seconds, self._num_messages, self._num_tokens, num_writes)
            os.write(self.file, told.packed())
        self._began, self._num_messages, self._num_tokens = 0.0, 0, 0


def _file(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def main() -> None:
    if sys.argv[1] == "serve":
        from quire.cli.main import main as quire

        LoggedRequests.file = _file(sys.argv[2] + ".server")
        engine_client.RequestsInFlight = LoggedRequests  # type: ignore[attr-defined]
        EngineProcess.program = ("-m", "quire.cli.step_log", "engine", sys.argv[2])
        sys.argv = ["quire", "serve", *sys.argv[3:]]
        sys.exit(quire())
    LoggedEngine.file = _file(sys.argv[2])
    process.Engine = LoggedEngine  # type: ignore[attr-defined]
    sys.exit(process.main(int(sys.argv[3]), int(sys.argv[4])))


if __name__ == "__main__":
    main()
