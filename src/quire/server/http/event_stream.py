"""A response that is sent while it is generated, to a client that may disconnect."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.errors import QuireError, Unavailable
from quire.server.access.request_context import note_error
from quire.server.errors import ClientDisconnected
from quire.server.http.connection import STREAM
from quire.server.http.wire_format import WireFormat

T = TypeVar("T")
log = logging.getLogger("quire.server")


async def _nothing() -> None:
    pass


async def _no_parts() -> AsyncGenerator[bytes, None]:
    return
    yield b""


class Frames(Protocol):
    """The bytes of a stream, taken by who is told that there are some."""

    ended: bool
    failure: Exception | None  # why it ended, if that is no success

    def listen(self, on_ready: Callable[[], object]) -> None: ...

    @property
    def has_more(self) -> bool:
        """Whether more was ready than the last `take` returned."""

    def take(self) -> bytes:
        """The next of what is ready; empty if nothing is."""

    def close(self) -> None:
        """Listen no more."""


class EventStream(Response):
    """Sends `parts` as they come. An error ends the stream with an error frame. `close` is called before the end is
    sent, and once more when the response is over."""

    def __init__(
        self,
        wire: WireFormat,
        parts: AsyncGenerator[bytes, None],
        keep_alive: float,
        close: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(media_type=wire.media_type, headers=headers)
        del self.headers["content-length"]
        self._wire, self._parts, self._close = wire, parts, close
        self._keep_alive = keep_alive if wire.keep_alive else 0.0
        self._clock = asyncio.get_running_loop().time
        self._last_sent = 0.0  # loop time; infinite while a write waits for the client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except ClientDisconnected:
            log.debug("client disconnected in the middle of a stream")
        except asyncio.CancelledError:  # the drain timeout is over
            error = Unavailable("the server is shutting down", "ask again")
            await send({"type": "http.response.body", "body": self._error_frame(error), "more_body": False})
            raise
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._last_sent = self._clock()
        pulse = asyncio.create_task(self._send_keep_alives(send)) if self._keep_alive else None
        try:
            await self._send_parts(send)
        except QuireError as error:
            await self._send_part(send, self._error_frame(error))
        except Exception:
            log.exception("a stream failed")
            failure = QuireError("the server failed in the middle of this stream")
            await self._send_part(send, self._error_frame(failure))
        finally:
            if pulse is not None:
                pulse.cancel()
        await self._close()  # a client that sees the end may send its next request: the quota is charged by then
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_keep_alives(self, send: Send) -> None:
        """Proxies drop connections that are silent for long."""
        while True:
            wait = self._last_sent + self._keep_alive - self._clock()
            if wait <= 0:
                await send({"type": "http.response.body", "body": self._wire.keep_alive, "more_body": True})
                self._last_sent, wait = self._clock(), self._keep_alive
            await asyncio.sleep(min(wait, self._keep_alive))

    async def _send_parts(self, send: Send) -> None:
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await self._send_part(send, part)

    async def _send_part(self, send: Send, part: bytes) -> None:
        self._last_sent = math.inf  # a client that reads slowly is not silent
        await send({"type": "http.response.body", "body": part, "more_body": True})
        self._last_sent = self._clock()

    def _error_frame(self, error: QuireError) -> bytes:
        note_error(error)
        return self._wire.frame(self._wire.error(error))


class FrameStream(EventStream):
    """Writes frames in the call that tells that they are there, without a task. What a client has not read yet is held
    as bytes, so many at most."""

    def __init__(
        self, wire: WireFormat, frames: Frames, keep_alive: float, close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(wire, _no_parts(), keep_alive, close)
        self._frames = frames
        self._write: Callable[[bytes], None] | None = None  # while frames may be written without a task
        self._woken = asyncio.Event()  # there is something that the task has to do: the end, if nothing else

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        await super().__call__(scope, receive, send)

    async def _send_parts(self, send: Send) -> None:
        frames = self._frames
        frames.listen(self._on_ready)
        try:
            while True:
                while part := frames.take():
                    await self._send_part(send, part)
                    await asyncio.sleep(0)  # much may be ready: others have their turn, and who sees that nobody reads
                if frames.ended:
                    break
                self._write = self._scope.get("extensions", {}).get(STREAM)
                await self._woken.wait()
                self._write = None
                self._woken.clear()
        finally:
            self._write = None
            frames.close()
        if frames.failure is not None:
            raise frames.failure

    def _on_ready(self) -> None:
        write, frames = self._write, self._frames
        if write is None:
            self._woken.set()
            return
        while part := frames.take():
            write(part)
            self._last_sent = self._clock()
            if not frames.has_more:
                break
        if frames.ended:
            self._woken.set()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, cancel `work` and raise ClientDisconnected."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        for task in (working, disconnecting):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
