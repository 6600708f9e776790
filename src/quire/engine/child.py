"""One engine process, from the outside: started, talked to, noticed when it dies."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import zmq
import zmq.asyncio

from quire.core.errors import EngineFailed
from quire.engine.messages import FromEngine, Start, ToEngine, decode_from_engine, encode
from quire.engine.spawned import PATIENCE, Spawned

T = TypeVar("T")


class EngineProcess:
    """`messages()` yields what the engine says and ends when its process has ended, however it ended."""

    def __init__(self, spawned: Spawned, socket: zmq.asyncio.Socket) -> None:
        self._spawned = spawned
        self._socket = socket
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        threading.Thread(target=self._wait, daemon=True).start()

    @classmethod
    async def start(cls, start: Start, spawned: Spawned | None = None) -> "EngineProcess":
        """In a process of its own, or in one that is there already and now belongs to the result."""
        self = cls(spawned or Spawned(), zmq.asyncio.Context.instance().socket(zmq.PAIR))
        try:
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(self._spawned.address)
            await self._unless_it_ends(self._socket.send(encode(start)))  # waits until the process has connected
        except BaseException:
            await self.stop()
            raise
        return self

    def _wait(self) -> None:
        self._spawned.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended, too
            self._ended.get_loop().call_soon_threadsafe(self._ended.set_result, None)

    async def _unless_it_ends(self, action: Awaitable[T]) -> "asyncio.Future[T] | None":
        """What the action came to; None if the process has ended first."""
        doing = asyncio.ensure_future(action)
        await asyncio.wait((doing, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing
        doing.cancel()
        return None

    @property
    def pid(self) -> int:
        return self._spawned.process.pid

    async def send(self, message: ToEngine) -> None:
        """Never waits: a live engine takes any number of messages, and a dead one is noticed by messages()."""
        with contextlib.suppress(zmq.ZMQError):
            await self._socket.send(encode(message), zmq.DONTWAIT)

    async def messages(self) -> AsyncIterator[FromEngine]:
        while received := await self._unless_it_ends(self._socket.recv()):
            yield decode_from_engine(received.result())
        while await self._socket.poll(50):  # its last words
            yield decode_from_engine(await self._socket.recv())

    async def stop(self) -> None:
        """End the process, kindly first, at once if this is cancelled; leave nothing behind."""
        try:
            self._spawned.ask_to_end()
            await asyncio.wait((self._ended,), timeout=PATIENCE)
        finally:
            self._spawned.process.kill()  # nothing happens to one that has ended
            await asyncio.wait((self._ended,))
            self._socket.close()
            self._spawned.tidy()

    def death(self) -> EngineFailed:
        status = self._spawned.process.returncode
        how = f"was killed by signal {-status}" if status is not None and status < 0 else f"ended with status {status}"
        return EngineFailed(f"the engine process {how}", "its last words are on standard error")
