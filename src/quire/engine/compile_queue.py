"""Grammars compiled in a thread while the engine steps. Their requests wait here."""

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from quire.core.request import Request
from quire.core.structured import Structured
from quire.ipc.active_work import GRAMMAR, ActiveWork
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.grammar.matcher import CompiledGrammar

COMPILE_NICENESS = 5  # added to the thread's: where no core is to spare, the loop comes first


@dataclass(slots=True)
class PendingRequest:
    request: Request
    cancelled: list[int] = field(default_factory=list)  # samples that were cancelled meanwhile
    grammar: CompiledGrammar | None = None  # keeps it compiled until the engine holds it
    error: Exception | None = None  # why it could not be compiled


class CompileQueue:
    """Requests whose grammar is being compiled, in the order they came."""

    def __init__(self, compiler: GrammarCompiler, active_work: ActiveWork | None = None) -> None:
        self._compiler = compiler
        self._active_work = active_work
        self._thread = ThreadPoolExecutor(1, "compiling", _lower_priority)
        self._pending: dict[str, PendingRequest] = {}
        self._compiled: deque[PendingRequest] = deque()
        self._read_end, self._write_end = os.pipe()

    def fileno(self) -> int:
        """Becomes readable when `ready` has become true."""
        return self._read_end

    @property
    def ready(self) -> bool:
        """Whether `take` returns something."""
        return bool(self._compiled)

    def add(self, request: Request) -> None:
        pending = self._pending[request.id] = PendingRequest(request)
        self._thread.submit(self._compile, pending)

    def warm_up(self) -> None:
        """Load what compiling takes, before the first request needs it."""
        self._thread.submit(self._compiler.compile, Structured("json"))

    def cancel(self, request_id: str, index: int | None) -> bool:
        """Cancel a request, or one sample of it. False: it does not wait here."""
        if (pending := self._pending.get(request_id)) is None:
            return False
        if index is None:
            del self._pending[request_id]
        else:
            pending.cancelled.append(index)
        return True

    def uses_adapter(self, key: str) -> bool:
        return any(pending.request.adapter == key for pending in self._pending.values())

    def take(self) -> list[PendingRequest]:
        """Requests whose grammar has been compiled, or has failed to, since the last call."""
        taken = []
        while self._compiled:
            os.read(self._read_end, 1)
            pending = self._compiled.popleft()
            if self._pending.get(pending.request.id) is pending:
                del self._pending[pending.request.id]
                taken.append(pending)
        return taken

    def _compile(self, pending: PendingRequest) -> None:
        structured = pending.request.params.structured
        assert structured is not None
        if self._active_work is not None:
            self._active_work.write(GRAMMAR, [(pending.request.id, 0)])
        try:
            pending.grammar = self._compiler.compile(structured)
        except Exception as error:
            pending.error = error
        if self._active_work is not None:
            self._active_work.clear(GRAMMAR)
        self._compiled.append(pending)
        os.write(self._write_end, b".")


def _lower_priority() -> None:
    if hasattr(os, "setpriority"):  # of this thread alone, on Linux; threads that it starts inherit it
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + COMPILE_NICENESS)
