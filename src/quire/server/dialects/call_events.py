"""The events of all requests of a call, and what consumes them."""

import asyncio
from collections.abc import Callable, Iterator
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

from quire.core.errors import QuireError, Unavailable
from quire.server.access.request_context import current_request_context
from quire.server.access.resumption import Resumption, delivered
from quire.server.dialects.dialect import Call
from quire.server.errors import Aborted
from quire.server.http.wire_format import WireFormat
from quire.text.event import TextEvent

if TYPE_CHECKING:
    from quire.client.service import TextStream

MAX_PART_BYTES = 1 << 16  # as much as a connection may buffer before it tells that its client is slow


class CallEvents:
    """`take` them whenever `listen` tells that there are some, until they have `ended`."""

    def __init__(self, streams: list["TextStream"]) -> None:
        self._streams = streams
        self._running = list(enumerate(streams))

    @property
    def ended(self) -> bool:
        return not self._running

    def listen(self, on_ready: Callable[[], object]) -> None:
        """It is called in the context of the caller, which knows the request."""
        on_ready = partial(copy_context().run, on_ready)
        for stream in self._streams:
            stream.listen(on_ready)

    def close(self) -> None:
        for stream in self._streams:
            stream.listen(_nothing)

    def take(self) -> Iterator[tuple[int, TextEvent]]:
        """Those that are there, each with the index of its request. Raises why a request has no answer."""
        for running in tuple(self._running):
            index, stream = running
            for event in stream.take():
                if event.error is not None or event.finish_reason == "cancelled":
                    raise _failure(event)
                if event.final:
                    self._running.remove(running)
                yield index, event


async def consume(streams: list["TextStream"], handle: Callable[[int, TextEvent], object]) -> None:
    """Hand every event to `handle` as it comes, until all requests have ended. Raises why one failed."""
    events = CallEvents(streams)
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take_all() -> None:
        try:
            for prompt, event in events.take():
                handle(prompt, event)
            if events.ended and not done.done():
                done.set_result(None)
        except Exception as error:
            if not done.done():
                done.set_exception(error)

    events.listen(take_all)
    take_all()
    try:
        await done
    finally:
        events.close()


class CallFrames:
    """The bytes of a streamed answer. Of a resumed one, frames of events that were delivered are not sent again."""

    def __init__(
        self, wire: WireFormat, call: Call, streams: list["TextStream"], resumption: Resumption | None = None
    ) -> None:
        self._wire, self._call, self._resumption = wire, call, resumption
        self._events = CallEvents(streams)
        self._taken: Iterator[tuple[int, TextEvent]] | None = None  # events whose frames are still to be made
        self._num_delivered = len(resumption.events) if resumption else 0
        self.ended = False  # all frames were taken, or the answer failed
        self.failure: Exception | None = None
        self.listen, self.close = self._events.listen, self._events.close

    @property
    def has_more(self) -> bool:
        return self._taken is not None

    def take(self) -> bytes:
        """The next frames that are ready, about MAX_PART_BYTES at most; empty if there are none."""
        frames, frame = bytearray(), self._wire.frame
        if self.ended:
            return b""
        try:
            if self._taken is None:
                self._taken = self._events.take()
            for prompt, event in self._taken:
                chunks = self._call.chunks(prompt, event)
                if self._num_delivered:
                    self._num_delivered -= 1
                    continue
                for chunk in chunks:
                    frames += chunk if isinstance(chunk, bytes) else frame(chunk)
                if self._resumption is not None and event.token_ids and not event.final:
                    frames += delivered(event.token_ids)
                if len(frames) > MAX_PART_BYTES:
                    break
            else:
                self._taken = None
                if self._events.ended:
                    self.ended = True
                    frames += b"".join(map(frame, self._call.end())) + self._wire.last
        except Exception as error:
            self.failure, self.ended = error, True
        return bytes(frames)


def _failure(event: TextEvent) -> QuireError:
    """Why a request ended without an answer."""
    if event.error is not None:
        return event.error
    if (context := current_request_context()) is not None and context.aborted:
        return Aborted("the request was cancelled by its id")
    return Unavailable(event.reason or "the request was cancelled")


def _nothing() -> None: ...
