"""Engines in processes of their own, none of which outlives the benchmark."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]

from quire.cli.bench.resources import peak_rss

ROOT = Path(__file__).parent.parent
SECONDS_TO_END = 15.0
PEAK_SECONDS = 0.02  # between two looks at a process's memory, whose peak the kernel keeps


class EngineDied(Exception):
    """A command ended, or never became ready; the message has the end of what it said."""


ENDED = 128 + signal.SIGTERM  # the status of who was asked to end
_asked_to_end: list[bool] = []


class Running:
    """A command under way, with all it has started."""

    def __init__(self, process: "subprocess.Popen[str]", log: IO[str], started: float) -> None:
        self.process = process
        self.started = started  # time.perf_counter() just before it was
        self._log = log

    def check(self) -> None:
        if _asked_to_end:  # and whatever was under way then has swallowed it
            sys.exit(ENDED)
        if self.process.poll() is not None:
            raise EngineDied(f"ended with status {self.process.returncode}\n{self.said()}")

    def said(self, num_lines: int = 25) -> str:
        """The end of what it printed."""
        self._log.seek(0)
        return "".join(self._log.readlines()[-num_lines:])

    def tree(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def memory(self) -> int:
        """Bytes of all its processes, a page that several share counting once (the sum of their PSS)."""
        total = 0
        for process in self.tree():
            try:
                total += _proportional_set_size(process.pid)
            except (OSError, ValueError):
                continue  # it has ended meanwhile
        return total

    def end(self) -> None:
        """SIGTERM, then SIGKILL for whoever is left: sessions of their own included."""
        tree = self.tree()
        if self.process.poll() is None:
            self.process.terminate()
        _, left = psutil.wait_procs(tree, SECONDS_TO_END)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, SECONDS_TO_END)
        self.process.wait()


@contextmanager
def running(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    *,
    piped: bool = False,
) -> Iterator[Running]:
    """The command until the block ends. Out of this terminal's reach: Ctrl-C comes to us, and we end it.

    What it prints is kept for `said`; with `piped`, stdin and stdout are for talking to it."""
    pipe = subprocess.PIPE if piped else subprocess.DEVNULL
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,  # so that `-m benchmarks...` is found
            env={**os.environ, **(environment or {})},
            stdin=pipe,
            stdout=subprocess.PIPE if piped else log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        engine = Running(process, log, started)
        try:
            yield engine
        finally:
            engine.end()
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()


class MemoryWatch:
    """The most memory an engine had, looked up every second."""

    def __init__(self, engine: Running) -> None:
        self.peak = 0
        self._engine = engine
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(1.0):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, self._engine.memory())

    def __enter__(self) -> "MemoryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()


def wait_with_peak(process: "subprocess.Popen[bytes]") -> tuple[resource.struct_rusage, int]:
    """When the process has ended -> what it used, and the most bytes that were resident.

    Its `ru_maxrss` does not tell: it is no less than what was resident in this process when it started the other."""
    peak = 0
    while True:
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            process.returncode = os.waitstatus_to_exitcode(status)
            return used, peak
        peak = max(peak, peak_rss(process.pid) or 0)
        time.sleep(PEAK_SECONDS)


def _proportional_set_size(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no Pss for {pid}")


def interruptible() -> None:
    """Let SIGTERM unwind as Ctrl-C does, so that whatever was started is ended."""

    def end(*_: object) -> None:
        _asked_to_end.append(True)
        sys.exit(ENDED)

    signal.signal(signal.SIGTERM, end)


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
