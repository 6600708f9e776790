"""Requests whose language is being compiled, in a thread: the loop of the engine goes on meanwhile."""

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from quire.core.request import Request
from quire.text.grammar import Grammar, GrammarCompiler

PATIENCE = 5  # added to the thread's niceness: where there is no core to spare, the loop comes first


@dataclass(slots=True)
class Compiled:
    request: Request
    cancelled: list[int] = field(default_factory=list)  # samples that were given up meanwhile
    grammar: Grammar | None = None  # held until the engine holds it
    problem: Exception | None = None  # why there is none


class Compiling:
    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._worker = ThreadPoolExecutor(1, "compiling", _give_way)
        self._waiting: dict[str, Compiled] = {}
        self._done: deque[Compiled] = deque()
        self._wake, self._waker = os.pipe()

    def fileno(self) -> int:
        """Can be read from when something is done."""
        return self._wake

    def begin(self, request: Request) -> None:
        entry = self._waiting[request.id] = Compiled(request)
        self._worker.submit(self._compile, entry)

    def cancel(self, request_id: str, index: int | None) -> bool:
        """Whether the request was waiting here."""
        if (entry := self._waiting.get(request_id)) is None:
            return False
        if index is None:
            del self._waiting[request_id]
        else:
            entry.cancelled.append(index)
        return True

    def done(self) -> list[Compiled]:
        """What has been compiled since, or could not be; without what was cancelled."""
        if not self._done:
            return []
        found = []
        for _ in range(len(self._done)):
            os.read(self._wake, 1)
            entry = self._done.popleft()
            if self._waiting.get(entry.request.id) is entry:
                found.append(self._waiting.pop(entry.request.id))
        return found

    def _compile(self, entry: Compiled) -> None:
        structured = entry.request.params.structured
        assert structured is not None
        try:
            entry.grammar = self._grammars.compile(structured)
        except Exception as problem:
            entry.problem = problem
        self._done.append(entry)
        os.write(self._waker, b".")


def _give_way() -> None:
    if hasattr(os, "setpriority"):  # of this thread alone, on Linux; those it starts inherit it
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + PATIENCE)
