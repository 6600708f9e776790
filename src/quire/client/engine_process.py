"""One engine process, from the outside: spawned, started, sent messages, noticed when it dies.

Importing takes both processes a while. A command that needs an engine spawns its process first, so that both import at
the same time: hence the modules of `start` are imported there."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from quire.ipc.active_work import ActiveWork, shared_file

if TYPE_CHECKING:
    from quire.core.errors import EngineFailed
    from quire.engine.messages import FromEngine, Start, ToEngine

STOP_TIMEOUT = 5.0  # seconds that the process has to end
KILLS = {signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


class EngineProcess:
    """Runs quire/engine/process.py. Until `start`, a context manager that leaves no process behind; from then on, used
    from one event loop until `stop`."""

    program: Sequence[str] = ("-m", "quire.engine.process")

    def __init__(self, cpus: Sequence[int] = ()) -> None:
        """`cpus`: those that it may use; none: all."""
        self._num_oom_kills = num_oom_kills()
        self.socket, theirs = socket.socketpair()
        with theirs, shared_file() as work_file:  # the child inherits copies
            self.active_work = ActiveWork(work_file)
            files = [theirs.fileno(), work_file]
            self.process = subprocess.Popen(
                [sys.executable, *self.program, *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what it prints is for people
                start_new_session=True,  # this process handles Ctrl-C
            )
        if cpus:
            with contextlib.suppress(OSError):  # it has ended already
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
        """Let it load a model."""
        import asyncio
        import threading

        from quire.ipc.channel import Channel

        self._channel = Channel(self.socket)
        self._inbox: deque[bytes] = deque()
        self._arrived = asyncio.Event()  # a message, or the end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._read)
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

    def send(self, message: "ToEngine") -> None:
        """Never blocks. A live engine takes any number of messages; `messages` notices a dead one."""
        from quire.engine.messages import encode

        if not self._channel.ended:
            self._channel.send(encode(message))
            if self._channel.has_unsent:
                self._loop.add_writer(self._channel.fileno(), self._write)

    async def messages(self) -> "AsyncIterator[FromEngine]":
        """What the engine sends, until its process has ended, however it ended."""
        from quire.engine.messages import decode_from_engine

        while True:
            while self._inbox:
                yield decode_from_engine(self._inbox.popleft())
            if self._channel.ended:
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def stop(self) -> None:
        """Ask the process to end, and kill it after STOP_TIMEOUT seconds, or at once if this is cancelled."""
        import asyncio

        try:
            self._channel.finish()
            await asyncio.wait((self._ended,), timeout=STOP_TIMEOUT)
        finally:
            self.process.kill()  # nothing happens if it has ended
            await asyncio.wait((self._ended,))
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()

    @property
    def was_killed(self) -> bool:
        """From outside, and not by the kernel because memory ran out: nothing that it did can be the cause."""
        out_of_memory = -self.process.returncode == signal.SIGKILL and num_oom_kills() > self._num_oom_kills
        return -self.process.returncode in KILLS and not out_of_memory

    def death(self) -> "EngineFailed":
        from quire.core.errors import EngineFailed

        status = self.process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return EngineFailed(f"the engine process {how}", "its last output is on standard error")

    def _read(self) -> None:
        if not self._channel.ended:
            self._inbox += self._channel.receive()
            self._arrived.set()
        if self._channel.ended:
            self._loop.remove_reader(self._channel.fileno())

    def _write(self) -> None:
        self._channel.flush()
        if not self._channel.has_unsent:
            self._loop.remove_writer(self._channel.fileno())

    def _wait(self) -> None:
        """In a thread."""
        self.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended, too
            self._loop.call_soon_threadsafe(self._on_exit)

    def _on_exit(self) -> None:
        self._read()  # its last messages
        self._channel.ended = True  # also if a process that it has started lives on and has the socket
        self._ended.set_result(None)


def num_oom_kills() -> int:
    """Processes that the kernel has killed because memory ran out; 0 where it does not count them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
