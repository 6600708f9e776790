"""What is sent while it is being made, and who still listens."""

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
from quire.server.dialects.dialect import Dialect
from quire.server.errors import ClientGone

T = TypeVar("T")
log = logging.getLogger("quire.server")


async def _nothing() -> None:
    pass


class EventStream(Response):
    """`parts` of a stream as they come. An error in the middle is the last thing sent. `close` is called before the
    end is sent, and once more when everything is over."""

    def __init__(
        self,
        dialect: Dialect,
        parts: AsyncGenerator[bytes, None],
        keep_alive: float,
        close: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        super().__init__(
            media_type=dialect.media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._dialect, self._parts, self._close = dialect, parts, close
        self._keep_alive = keep_alive if dialect.idle else 0.0
        self._sent = 0.0  # when something was last sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            log.debug("client left in the middle of a stream")
        except asyncio.CancelledError:  # the time to drain is over
            error = Unavailable("the server is shutting down", "ask again")
            await send({"type": "http.response.body", "body": self._told(error), "more_body": False})
            raise
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        clock = asyncio.get_running_loop().time
        self._sent = clock()
        pulse = asyncio.create_task(self._pulse(send)) if self._keep_alive else None
        try:
            async with aclosing(self._unbroken()) as parts:
                async for part in parts:
                    self._sent = math.inf  # a client that reads slowly is not silent
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                    self._sent = clock()
        finally:
            if pulse is not None:
                pulse.cancel()
        await self._close()  # whoever sees the end may ask again: it is paid for by then
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pulse(self, send: Send) -> None:
        """A word now and then while there is nothing to say: proxies drop connections that are silent."""
        clock = asyncio.get_running_loop().time
        while True:
            wait = self._sent + self._keep_alive - clock()
            if wait <= 0:
                await send({"type": "http.response.body", "body": self._dialect.idle, "more_body": True})
                self._sent, wait = clock(), self._keep_alive
            await asyncio.sleep(min(wait, self._keep_alive))

    async def _unbroken(self) -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    yield part
        except QuireError as error:
            yield self._told(error)
        except Exception:
            log.exception("a stream failed")
            yield self._told(QuireError("the server failed in the middle of this stream"))

    def _told(self, error: QuireError) -> bytes:
        note_error(error)
        return self._dialect.frame(self._dialect.error(error))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; it is cancelled, and ClientGone raised, as soon as the client closes the connection."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
