"""One engine process, from the outside: spawned, started, sent messages, noticed when it dies.

Importing takes both processes a while. A command that needs an engine spawns its process first, so that both import at
the same time: hence the modules of `start` are imported there."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from quire.ipc.active_work import ActiveWork, RequestSample, shared_file

if TYPE_CHECKING:
    from quire.core.errors import EngineFailed
    from quire.engine.messages import FromEngine, Start, ToEngine

STOP_TIMEOUT = 5.0  # seconds that the process has to end
KILLS = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


class EngineLink(Protocol):
    """An engine from the outside, wherever its process is. Nothing is sent before `start`."""

    @property
    def pid(self) -> int: ...

    async def start(self, message: "Start") -> None:
        """Let it load a model."""

    def send(self, message: "ToEngine") -> None:
        """Never blocks. A live engine takes any number of messages; `messages` notices a dead one."""

    def messages(self) -> "AsyncIterator[list[FromEngine]]":
        """What the engine sends, all that is there at a time, until its process has ended, however it ended."""

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    @property
    def was_killed(self) -> bool:
        """From outside, and not by the kernel because memory ran out: nothing that it did can be the cause."""

    def death(self) -> "EngineFailed": ...

    def active_samples(self) -> set[RequestSample]:
        """The samples that the engine worked on when its process ended."""


class EngineProcess:
    """Implements `EngineLink` with a process of this machine, which runs quire/engine/process.py. Until `start`, a
    context manager that leaves no process behind; from then on, used from one event loop until `stop`."""

    program: Sequence[str] = ("-m", "quire.engine.process")
    send: "Callable[[ToEngine], None]"
    messages: "Callable[[], AsyncIterator[list[FromEngine]]]"

    def __init__(self, cpus: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> None:
        """`cpus`: those that it may use; none: all. `environment`: variables besides those of this process."""
        self._num_oom_kills = num_oom_kills()
        self.socket, theirs = socket.socketpair()
        self.process, self.active_work = spawn_engine(theirs, self.program, environment)
        if cpus:
            with contextlib.suppress(OSError):  # the process has ended already
                os.sched_setaffinity(self.process.pid, cpus)

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()  # asks it to end, unless it was asked before
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT)
        self.process.kill()  # nothing happens if it has ended
        self.process.wait()

    async def start(self, message: "Start") -> None:
        import asyncio
        import threading

        from quire.client.engine_channel import EngineChannel

        self._channel = EngineChannel(self.socket)
        self.send, self.messages = self._channel.send, self._channel.messages
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._wait, daemon=True).start()
        try:
            self.send(message)
        except BaseException:
            await self.stop()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    async def stop(self) -> None:
        """Ask the process to end, and kill it after STOP_TIMEOUT seconds, or at once if this is cancelled."""
        import asyncio

        try:
            self._channel.finish()
            await asyncio.wait((self._ended,), timeout=STOP_TIMEOUT)
        finally:
            self.process.kill()  # nothing happens if it has ended
            await asyncio.wait((self._ended,))
            self._channel.close()

    def kill(self) -> None:
        self.process.kill()

    def active_samples(self) -> set[RequestSample]:
        return self.active_work.read()

    @property
    def was_killed(self) -> bool:
        out_of_memory = -self.process.returncode == signal.SIGKILL and num_oom_kills() > self._num_oom_kills
        return -self.process.returncode in KILLS and not out_of_memory

    def death(self) -> "EngineFailed":
        return engine_death(self.process.returncode)

    def _wait(self) -> None:
        """Wait for the process to end. This blocks, and runs in a thread."""
        self.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended, too
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        self._channel.end()
        self._ended.set_result(None)


def spawn_engine(
    theirs: socket.socket, program: Sequence[str] = EngineProcess.program, environment: Mapping[str, str] | None = None
) -> tuple["subprocess.Popen[bytes]", ActiveWork]:
    """Start an engine process with this end of a connection, which it takes, and see what it works on."""
    with theirs, shared_file() as work_file:  # the child inherits copies
        active_work = ActiveWork(work_file)
        files = [theirs.fileno(), work_file]
        process = subprocess.Popen(
            [sys.executable, *program, *map(str, files)],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=2,  # what it prints is for people
            start_new_session=True,  # this process handles Ctrl-C
            env={**os.environ, **environment} if environment else None,
        )
    return process, active_work


def engine_death(status: int | None, where: str = "") -> "EngineFailed":
    from quire.core.errors import EngineFailed

    how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
    return EngineFailed(f"the engine process {how}{where}", "its last output is on standard error")


def num_oom_kills() -> int:
    """Processes that the kernel has killed because memory ran out; 0 where it does not count them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
