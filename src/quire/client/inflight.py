"""Requests in flight: the text of a generation, or the results of encoded texts. They outlive the engine process."""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Protocol

from quire.client.live_request import LiveRequest
from quire.client.service import Observer, TokenGap
from quire.core.encode_request import EncodeEvent, EncodeRequest
from quire.core.errors import DeadlinePassed, EngineFailed, QuireError, Unavailable
from quire.core.records import RequestRecord
from quire.core.request import FinishReason, Request, SequenceEvent
from quire.engine.messages import Cancel, Encode, Submit, ToEngine
from quire.text.event import TextEvent
from quire.text.tokenizers.tokenizer import Tokenizer

EXPIRY_DELAY = 0.25  # seconds after its deadline that a request is cancelled, if the engine has not done so


class InFlight(Protocol):
    """A request that an engine works on, or will."""

    id: str
    num_prompt_tokens: int
    crashes: Counter[int]  # by sample or text: engines that died while they worked on it, since it last gained output
    num_kills: int  # engines that were killed from outside while they worked on it, since it last gained output
    waiting: bool  # the request has no output yet
    owner: "RequestOwner"  # the client of its engine
    left: set[object]  # engine processes that it was taken from: they may still tell of it
    on_ready: Callable[[], object]  # called when events have been pushed

    @property
    def record(self) -> RequestRecord | None:
        """Once it has ended."""

    @property
    def finished(self) -> bool: ...

    def submission(self) -> list[ToEngine]:
        """The messages from which a new engine goes on with it."""

    def push(self, event: Any) -> Cancel | None:
        """Take an event of the engine. -> what the engine must be told: a stop string ends a sample on this side"""

    def crashed(self, sample: int) -> None:
        """An engine died while it worked on this sample, or on this text of the submission."""

    def refuse(self, error: QuireError) -> None: ...

    def fail(self, reason: str, finish_reason: FinishReason = "error") -> None: ...


class RequestOwner(Protocol):
    """The client of requests in flight, as far as these tell it what became of them."""

    observer: Observer | None

    def request_started(self, request: InFlight) -> None:
        """A request has its first output."""

    def request_ended(self, request: InFlight) -> None:
        """Called once, however it ended."""

    def cancel(self, request: InFlight) -> None: ...


class GenerateStream:
    """Implements `TextStream`: text events as they arrive."""

    def __init__(self, request: Request, tokenizer: Tokenizer, owner: RequestOwner) -> None:
        self.live = LiveRequest(request, tokenizer)
        self.id = request.id
        self.prompt_ids = request.prompt_ids
        self.num_prompt_tokens = len(self.prompt_ids)
        self.crashes: Counter[int] = Counter()
        self.num_kills = 0
        self.waiting = True
        self.owner, self.left = owner, set()
        self._last_token: dict[int, float] = {}  # when each sample last gained one
        self._ready: list[TextEvent] = []
        self.on_ready: Callable[[], object] = _nothing
        self._timer: asyncio.TimerHandle | None = None
        if request.deadline is not None:
            left = request.deadline - time.monotonic() + EXPIRY_DELAY
            self._timer = asyncio.get_running_loop().call_later(left, lambda: self.owner.cancel(self))

    @property
    def finished(self) -> bool:
        return self.live.finished

    @property
    def record(self) -> RequestRecord | None:
        return self.live.record

    def submission(self) -> list[ToEngine]:
        ended = [Cancel(self.id, index) for index in self.live.ended_samples]
        return [Submit(self.live.resumption()), *ended]

    def replay(self, tokens: list[int]) -> None:
        """Take an event that another server has delivered."""
        text = self.live.push(SequenceEvent(request_id=self.id, index=0, tokens=tokens))
        if text is not None:
            self._put(text)

    def push(self, event: SequenceEvent) -> Cancel | None:
        text = self.live.push(event)
        if text is None:
            return None
        if text.token_ids or text.prompt_logprobs or text.finish_reason:
            del self.crashes[event.index]
            self.num_kills = 0
        if event.tokens:
            self._count_tokens(event.index, len(event.tokens), time.monotonic())
        self._put(text)
        return Cancel(self.id, event.index) if text.finish_reason and not event.finish_reason else None

    def push_tokens(self, tokens: list[int], now: float, gaps: list[TokenGap]) -> Cancel | None:
        """`push` of an event that has nothing but these tokens of the first sample, as most do. `gaps` are for the
        observer."""
        text = self.live.push_tokens(tokens, now)
        if text is None:
            return self.push(SequenceEvent(request_id=self.id, index=0, tokens=tokens))
        if self.crashes:
            del self.crashes[0]
        self.num_kills = 0
        if self.waiting:
            self.owner.request_started(self)
        if (last := self._last_token.get(0)) is not None:
            gaps.append((now - last, len(tokens)))
        self._last_token[0] = now
        self._ready.append(text)
        return None

    def _count_tokens(self, sample: int, num_tokens: int, now: float) -> None:
        if self.waiting:
            self.owner.request_started(self)
        if (observer := self.owner.observer) is not None:
            if (last := self._last_token.get(sample)) is not None:
                observer.tokens([(now - last, num_tokens)])
            self._last_token[sample] = now

    def _put(self, event: TextEvent) -> None:
        if event.finish_reason == "error" and event.error is None:
            event.error = EngineFailed(event.reason)
        elif event.finish_reason == "cancelled" and self._is_late():
            event.error = DeadlinePassed(event.reason, "allow more time, or ask for less")
        self._ready.append(event)
        if event.final:
            self._end()

    def crashed(self, sample: int) -> None:
        self.crashes[sample] += 1

    def refuse(self, error: QuireError) -> None:
        event = self.live.fail(error.message)
        event.error = error
        self._put(event)
        self.on_ready()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.owner.request_ended(self)

    def fail(self, reason: str, finish_reason: FinishReason = "error") -> None:
        self._put(self.live.fail(reason, finish_reason))
        self.on_ready()

    def listen(self, on_ready: Callable[[], object]) -> None:
        self.on_ready = on_ready

    def take(self) -> list[TextEvent]:
        ready, self._ready = self._ready, []
        return ready

    async def __aiter__(self) -> AsyncIterator[TextEvent]:
        ready = asyncio.Event()
        self.listen(ready.set)
        while True:
            while self._ready:  # one by one: what this iterator leaves is for the next
                event = self._ready.pop(0)
                if event.error is not None:
                    raise event.error
                yield event
                if event.final:
                    return
            await ready.wait()
            ready.clear()

    async def aclose(self) -> None:
        self.owner.cancel(self)

    def _is_late(self) -> bool:
        deadline = self.live.request.deadline
        return deadline is not None and time.monotonic() >= deadline


class EncodeFuture:
    """The results of all texts of one request, once they are there."""

    def __init__(self, request: EncodeRequest, owner: RequestOwner) -> None:
        self.request = request
        self.id = request.id
        self.num_prompt_tokens = request.num_tokens
        self.crashes: Counter[int] = Counter()
        self.num_kills = 0
        self.waiting = True
        self.record: RequestRecord | None = None
        self._arrival = time.monotonic()
        self._results: dict[int, bytes] = {}  # fp32, by text
        self._submitted: list[int] = []  # texts that the engine has been given
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.owner = owner
        self.left: set[object] = set()
        self.on_ready: Callable[[], object] = _nothing

    @property
    def finished(self) -> bool:
        return self.record is not None

    def submission(self) -> list[ToEngine]:
        """The texts that have no result."""
        texts = self.request.texts
        self._submitted = [index for index in range(len(texts)) if index not in self._results]
        return [Encode(replace(self.request, texts=[texts[index] for index in self._submitted]))]

    def push(self, event: EncodeEvent) -> None:
        if event.reason:
            self._end("cancelled", DeadlinePassed(event.reason, "allow more time, or send fewer texts"))
            return
        text = self._submitted[event.index]
        self._results[text] = event.numbers
        del self.crashes[text]
        self.num_kills = 0
        if len(self._results) == len(self.request.texts):
            self._end("stop", None)

    def crashed(self, sample: int) -> None:
        self.crashes[self._submitted[sample]] += 1

    def refuse(self, error: QuireError) -> None:
        self._end("error", error)

    def fail(self, reason: str, finish_reason: FinishReason = "error") -> None:
        self._end(finish_reason, Unavailable(reason) if finish_reason == "cancelled" else EngineFailed(reason))

    async def results(self) -> list["array[float]"]:
        await self._done
        return [array("f", self._results[index]) for index in range(len(self.request.texts))]

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
        if not self._done.done():  # the caller may have left
            self._done.set_exception(error) if error else self._done.set_result(None)
        self.owner.request_ended(self)


def _nothing() -> None: ...
