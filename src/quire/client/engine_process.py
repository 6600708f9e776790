"""One engine process, from the outside: started, talked to, noticed when it dies."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator

from quire.client.spawned import PATIENCE, Spawned
from quire.core.errors import EngineFailed
from quire.engine.messages import FromEngine, Start, ToEngine, decode_from_engine, encode
from quire.ipc.channel import Channel


class EngineProcess:
    """`messages()` yields what the engine says and ends when its process has ended, however it ended."""

    def __init__(self, spawned: Spawned) -> None:
        self._spawned = spawned
        self._channel = Channel(spawned.socket)
        self._inbox: deque[bytes] = deque()
        self._news = asyncio.Event()  # something has come, or nothing will any more
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel.fileno(), self._read)
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._wait, daemon=True).start()

    @classmethod
    async def start(cls, start: Start, spawned: Spawned | None = None) -> "EngineProcess":
        """In a process of its own, or in one that is there already and now belongs to the result."""
        self = cls(spawned or Spawned())
        try:
            await self.send(start)
        except BaseException:
            await self.stop()
            raise
        return self

    def _wait(self) -> None:
        self._spawned.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended, too
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._read()  # its last words
        self._channel.ended = True  # also if a process that it has started lives on and has the socket
        self._ended.set_result(None)

    def _read(self) -> None:
        if not self._channel.ended:
            self._inbox += self._channel.receive()
            self._news.set()
        if self._channel.ended:
            self._loop.remove_reader(self._channel.fileno())

    def _write(self) -> None:
        self._channel.flush()
        if not self._channel.behind:
            self._loop.remove_writer(self._channel.fileno())

    @property
    def pid(self) -> int:
        return self._spawned.process.pid

    async def send(self, message: ToEngine) -> None:
        """Never waits: a live engine takes any number of messages, and a dead one is noticed by messages()."""
        if not self._channel.ended:
            self._channel.send(encode(message))
            if self._channel.behind:
                self._loop.add_writer(self._channel.fileno(), self._write)

    async def messages(self) -> AsyncIterator[FromEngine]:
        while True:
            while self._inbox:
                yield decode_from_engine(self._inbox.popleft())
            if self._channel.ended:
                return
            self._news.clear()
            await self._news.wait()

    async def stop(self) -> None:
        """End the process, kindly first, at once if this is cancelled; leave nothing behind."""
        try:
            self._channel.finish()
            await asyncio.wait((self._ended,), timeout=PATIENCE)
        finally:
            self._spawned.process.kill()  # nothing happens to one that has ended
            await asyncio.wait((self._ended,))
            self._loop.remove_writer(self._channel.fileno())
            self._channel.close()

    def death(self) -> EngineFailed:
        status = self._spawned.process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return EngineFailed(f"the engine process {how}", "its last words are on standard error")
