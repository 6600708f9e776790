"""A response that is sent while it is generated, to a client that may disconnect."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.core.errors import QuireError, Unavailable
from quire.server.access.request_context import note_error
from quire.server.errors import ClientDisconnected
from quire.server.http.wire_format import WireFormat

T = TypeVar("T")
log = logging.getLogger("quire.server")


async def _nothing() -> None:
    pass


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
        clock = asyncio.get_running_loop().time
        self._last_sent = clock()
        pulse = asyncio.create_task(self._send_keep_alives(send)) if self._keep_alive else None
        try:
            async with aclosing(self._parts_or_error()) as parts:
                async for part in parts:
                    self._last_sent = math.inf  # a client that reads slowly is not silent
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    self._last_sent = clock()
        finally:
            if pulse is not None:
                pulse.cancel()
        await self._close()  # a client that sees the end may send its next request: the quota is charged by then
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_keep_alives(self, send: Send) -> None:
        """Proxies drop connections that are silent for long."""
        clock = asyncio.get_running_loop().time
        while True:
            wait = self._last_sent + self._keep_alive - clock()
            if wait <= 0:
                await send({"type": "http.response.body", "body": self._wire.keep_alive, "more_body": True})
                self._last_sent, wait = clock(), self._keep_alive
            await asyncio.sleep(min(wait, self._keep_alive))

    async def _parts_or_error(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    yield part
        except QuireError as error:
            yield self._error_frame(error)
        except Exception:
            log.exception("a stream failed")
            yield self._error_frame(QuireError("the server failed in the middle of this stream"))

    def _error_frame(self, error: QuireError) -> bytes:
        note_error(error)
        return self._wire.frame(self._wire.error(error))


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
