"""What clients wait for: the text of a request, or the numbers of texts that are read. The engine may die meanwhile."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from quire.client.live_request import LiveRequest
from quire.core.encode_request import EncodeEvent, EncodeRequest
from quire.core.errors import DeadlinePassed, EngineFailed, QuireError, Unavailable
from quire.core.records import RequestRecord
from quire.core.request import FinishReason
from quire.engine.messages import Cancel, Encode, Submit, ToEngine
from quire.text.event import TextEvent


class InFlight(Protocol):
    """`on_end` is called once, when it has ended, however that was."""

    id: str
    num_prompt_tokens: int
    num_crashes: int  # engines that died while it was there
    waiting: bool  # nothing has come back yet

    @property
    def record(self) -> RequestRecord | None:
        """Once it has ended."""

    @property
    def finished(self) -> bool: ...

    def again(self) -> list[ToEngine]:
        """What an engine that has lost its memory, or has none yet, is to be told."""

    def refuse(self, error: QuireError) -> None: ...

    def give_up(self, reason: str, finish_reason: FinishReason = "error") -> None: ...


class GenerateStream:
    """Implements `TextStream`."""

    def __init__(
        self,
        live: LiveRequest,
        on_end: Callable[["GenerateStream"], None],
        cancel: Callable[["GenerateStream"], Awaitable[None]],
    ) -> None:
        self.live = live
        self.id = live.request.id
        self.prompt_ids = live.request.prompt_ids
        self.num_prompt_tokens = len(self.prompt_ids)
        self.last_token: dict[int, float] = {}  # when each sample last gained one
        self.num_crashes = 0
        self.waiting = True
        self._on_end, self._cancel = on_end, cancel
        self._queue: asyncio.Queue[TextEvent | QuireError] = asyncio.Queue()

    @property
    def finished(self) -> bool:
        return self.live.finished

    @property
    def record(self) -> RequestRecord | None:
        return self.live.record

    @property
    def num_ready(self) -> int:
        return self._queue.qsize()

    def again(self) -> list[ToEngine]:
        ended = [Cancel(self.id, index) for index in self.live.ended_samples]
        return [Submit(self.live.resumption()), *ended]

    def put(self, event: TextEvent) -> None:
        self._queue.put_nowait(event)
        if event.final:
            self._on_end(self)

    def refuse(self, error: QuireError) -> None:
        self.live.fail(error.message)
        self._queue.put_nowait(error)
        self._on_end(self)

    def give_up(self, reason: str, finish_reason: FinishReason = "error") -> None:
        self.put(self.live.fail(reason, finish_reason))

    async def __aiter__(self) -> AsyncIterator[TextEvent]:
        while True:
            event = await self._queue.get()
            if isinstance(event, QuireError):
                raise event
            if event.finish_reason == "error":
                raise EngineFailed(event.reason)
            if event.finish_reason == "cancelled" and self._is_late():
                raise DeadlinePassed(event.reason, "allow more time, or ask for less")
            yield event
            if event.final:
                return

    async def aclose(self) -> None:
        await self._cancel(self)

    def _is_late(self) -> bool:
        deadline = self.live.request.deadline
        return deadline is not None and time.monotonic() >= deadline


class EncodeFuture:
    """The numbers of each text of one request, once all of them are there."""

    def __init__(self, request: EncodeRequest, on_end: Callable[["EncodeFuture"], None]) -> None:
        self.request = request
        self.id = request.id
        self.num_prompt_tokens = request.num_tokens
        self.num_crashes = 0
        self.waiting = True
        self.record: RequestRecord | None = None
        self._arrival = time.monotonic()
        self._numbers: dict[int, bytes] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_end = on_end

    @property
    def finished(self) -> bool:
        return self.record is not None

    def again(self) -> list[ToEngine]:
        """All of it: a text that is read twice has the same numbers."""
        return [Encode(self.request)]

    def push(self, event: EncodeEvent) -> None:
        if event.reason:
            self._end("cancelled", DeadlinePassed(event.reason, "allow more time, or send fewer texts"))
            return
        self._numbers[event.index] = event.numbers
        if len(self._numbers) == len(self.request.texts):
            self._end("stop", None)

    def refuse(self, error: QuireError) -> None:
        self._end("error", error)

    def give_up(self, reason: str, finish_reason: FinishReason = "error") -> None:
        self._end(finish_reason, Unavailable(reason) if finish_reason == "cancelled" else EngineFailed(reason))

    async def numbers(self) -> list["array[float]"]:
        await self._done
        return [array("f", self._numbers[index]) for index in range(len(self.request.texts))]

    def _end(self, finish_reason: FinishReason, error: QuireError | None) -> None:
        if self.finished:
            return
        self.record = RequestRecord(
            id=self.id,
            finish_reason=finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=0,
            num_output_tokens=0,
            num_samples=1,
            max_tokens=None,
            arrival=self._arrival,
            first_token=None,
            last_token=None,
            finished=time.monotonic(),
        )
        if not self._done.done():  # whoever waited may have left
            self._done.set_exception(error) if error else self._done.set_result(None)
        self._on_end(self)
