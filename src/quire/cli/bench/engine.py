"""Times an engine in this process.

Prompts and outputs are token ids: neither text nor HTTP is measured."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from quire.cli.bench.prompts import BenchRequest
from quire.core.errors import EngineFailed
from quire.core.params import SamplingParams
from quire.core.request import Request, SequenceEvent
from quire.engine.engine import Engine


@dataclass(slots=True)
class Timing:
    """One request. Times are time.perf_counter()."""

    num_prompt: int
    asked: float
    first: float | None = None  # when its first token came
    last: float = 0.0  # when its latest token came
    num_output: int = 0
    finished: bool = False

    def take(self, event: SequenceEvent, now: float) -> int:
        """-> the tokens that were decoded: all but the first, which prefill gives"""
        if event.finish_reason == "error":
            raise EngineFailed(event.reason)
        self.finished = event.final
        if not event.tokens:
            return 0
        self.num_output += len(event.tokens)
        self.last = now
        if self.first is None:
            self.first = now
            return len(event.tokens) - 1
        return len(event.tokens)

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.asked

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first."""
        if self.first is None or self.num_output < 2:
            return None
        return (self.last - self.first) / (self.num_output - 1)


@dataclass(slots=True)
class Phase:
    """Steps of one kind, summed up."""

    steps: int = 0
    tokens: int = 0  # computed
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class BenchRun:
    """Requests that were submitted together, until all have finished or the user interrupts."""

    requests: list[Timing]
    prefill: Phase = field(default_factory=Phase)  # steps with prompts in them; counts prompt tokens
    decode: Phase = field(default_factory=Phase)  # steps without prompts
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def num_finished(self) -> int:
        return sum(request.finished for request in self.requests)

    @property
    def num_input(self) -> int:
        """Prompt tokens of the requests that have a first token."""
        return sum(request.num_prompt for request in self.requests if request.first is not None)

    @property
    def num_output(self) -> int:
        return sum(request.num_output for request in self.requests)


class EngineBench:
    def __init__(self, engine: Engine, temperature: float, seed: int) -> None:
        self.engine = engine
        self._temperature, self._seed = temperature, seed
        self._names = (str(number) for number in count())

    def run(
        self,
        requests: Sequence[BenchRequest],
        on_finished: Callable[[], object] = lambda: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> BenchRun:
        """Submit all requests at once. Those that are not finished when `stopped` are cancelled."""
        live = dict(map(self._submit, requests))
        result = BenchRun(list(live.values()))
        begin = before = time.perf_counter()
        while self.engine.has_work and not stopped():
            num_decoded = 0
            for event in self.engine.step():
                timing = live[event.request_id]
                num_decoded += timing.take(event, time.perf_counter())
                if event.final:
                    del live[event.request_id]
                    on_finished()
            record = self.engine.record
            if record is not None and record.num_tokens:
                now, num_prompt = time.perf_counter(), record.num_tokens - num_decoded
                (result.prefill if num_prompt > 0 else result.decode).add(num_prompt or num_decoded, now - before)
                before = now
        result.seconds = before - begin
        result.interrupted = bool(live)
        for name in live:
            self.engine.cancel(name)
        return result

    def _submit(self, request: BenchRequest) -> tuple[str, Timing]:
        name = next(self._names)
        params = SamplingParams(
            temperature=self._temperature, max_tokens=request.output_len, ignore_eos=True, seed=self._seed + int(name)
        )
        self.engine.submit(Request(id=name, prompt_ids=request.prompt_ids, params=params))
        return name, Timing(len(request.prompt_ids), time.perf_counter())
