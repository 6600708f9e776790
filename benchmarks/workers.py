"""Talking to an engine's speed worker (peers/worker.py) in a process of its own."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from benchmarks.cases import Case
from benchmarks.engines import Command
from benchmarks.processes import EngineDied, Running, running


class Worker:
    def __init__(self, engine: Running) -> None:
        self._engine = engine
        self.read()  # it is loaded

    def measure(self, case: Case, seed: int) -> float:
        """Tokens a second."""
        return float(self.ask(json.dumps({"case": asdict(case), "seed": seed})))

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.read()

    def tell(self, line: str) -> None:
        """Without waiting for the answer, which `read` returns."""
        stdin = self._engine.process.stdin
        assert stdin is not None
        stdin.write(line + "\n")
        stdin.flush()

    def read(self) -> str:
        stdout = self._engine.process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self._engine.process.wait()
            raise EngineDied(f"the worker ended with status {self._engine.process.returncode}\n{self._engine.said()}")
        return line


@contextmanager
def worker(command: Command) -> Iterator[Worker]:
    """A worker whose engine is loaded, until the block ends."""
    with running(command.words, command.environment, piped=True) as engine:
        yield Worker(engine)
