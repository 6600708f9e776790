"""An engine whose loop does not wait until a language is compiled: that happens in a thread."""

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from quire.core.errors import QuireError
from quire.core.records import SchedulerStats, StepRecord
from quire.core.request import Request, SequenceEvent
from quire.core.snapshot import Snapshot
from quire.core.structured import Structured
from quire.engine.engine import Engine
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.grammar.matcher import CompiledGrammar

PATIENCE = 5  # added to the thread's niceness: where there is no core to spare, the loop comes first


@dataclass(slots=True)
class _Waiting:
    request: Request
    cancelled: list[int] = field(default_factory=list)  # samples that were given up meanwhile
    grammar: CompiledGrammar | None = None  # held until the engine holds it
    problem: Exception | None = None  # why there is none


class StructuredEngine:
    """An `Engine`, except that `submit` never waits: what is wrong with a language is told to `refuse`, in `step`."""

    def __init__(self, engine: Engine, grammars: GrammarCompiler, refuse: Callable[[Request, Exception], None]) -> None:
        self.record: StepRecord | None = None
        self._engine, self._grammars, self._refuse = engine, grammars, refuse
        self._worker = ThreadPoolExecutor(1, "compiling", _give_way)
        self._waiting: dict[str, _Waiting] = {}
        self._done: deque[_Waiting] = deque()
        self._wake, self._waker = os.pipe()

    def fileno(self) -> int:
        """Can be read from when `has_work` has become true by itself."""
        return self._wake

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or bool(self._done)

    @property
    def patience(self) -> float | None:
        return 0.0 if self._done else self._engine.patience

    def stats(self) -> SchedulerStats:
        return self._engine.stats()

    def watch(self, on: bool) -> None:
        self._engine.watch(on)

    def snapshot(self) -> Snapshot | None:
        return self._engine.snapshot()

    def uses_adapter(self, key: str) -> bool:
        waits = any(waiting.request.adapter == key for waiting in self._waiting.values())
        return waits or self._engine.uses_adapter(key)

    def submit(self, request: Request) -> None:
        structured = request.params.structured
        if structured is None or self._grammars.find(structured) is not None:
            self._engine.submit(request)
            return
        waiting = self._waiting[request.id] = _Waiting(request)
        self._worker.submit(self._compile, waiting)

    def prepare(self) -> None:
        """For languages to come."""
        self._worker.submit(self._grammars.compile, Structured("json"))

    def cancel(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        if (waiting := self._waiting.get(request_id)) is None:
            return self._engine.cancel(request_id, index)
        if index is None:
            del self._waiting[request_id]  # whoever has cancelled it waits for no more of it
        else:
            waiting.cancelled.append(index)
        return []

    def step(self) -> list[SequenceEvent]:
        events: list[SequenceEvent] = []
        while self._done:
            os.read(self._wake, 1)
            waiting = self._done.popleft()
            if self._waiting.get(waiting.request.id) is waiting:
                del self._waiting[waiting.request.id]
                events += self._admit(waiting)
        if self._engine.has_work:
            events += self._engine.step()
        self.record = self._engine.record
        return events

    def _admit(self, waiting: _Waiting) -> list[SequenceEvent]:
        request = waiting.request
        try:
            if waiting.problem is not None:
                raise waiting.problem
            self._engine.submit(request)
        except QuireError as error:
            self._refuse(request, error)
            return []
        return [event for index in waiting.cancelled for event in self._engine.cancel(request.id, index)]

    def _compile(self, waiting: _Waiting) -> None:
        structured = waiting.request.params.structured
        assert structured is not None
        try:
            waiting.grammar = self._grammars.compile(structured)
        except Exception as problem:
            waiting.problem = problem
        self._done.append(waiting)
        os.write(self._waker, b".")


def _give_way() -> None:
    if hasattr(os, "setpriority"):  # of this thread alone, on Linux; those it starts inherit it
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + PATIENCE)
