"""The requests that one engine has, or will have: how many they are, how long another would wait, and who is told what
they gain."""

import asyncio
import time
from collections.abc import Callable

from quire.client.forecast import Forecast
from quire.client.inflight import GenerateStream, InFlight
from quire.client.service import TokenGap
from quire.core.errors import BadRequest, QueueFull
from quire.core.records import StepRecord
from quire.core.request import FinishReason
from quire.engine.messages import ToEngine
from quire.engine.options import EngineOptions


class RequestsInFlight:
    """The requests that were submitted and have not finished. They outlive the engine process."""

    def __init__(self, options: EngineOptions, send: Callable[[ToEngine], None]) -> None:
        """`send`: to the engine of the moment."""
        self._send = send
        self.by_id: dict[str, InFlight] = {}  # in the order they came
        self.num_tokens = 0  # of prompts and texts
        self.forecast = Forecast(options.max_num_seqs)
        self._limit, self._max_wait = options.max_num_seqs + options.max_queued_requests, options.max_wait
        self._changed: dict[str, InFlight] = {}  # whose consumers have not been told yet
        self._stepped = asyncio.Event()  # a step was measured, or a request has ended
        self._idle = asyncio.Event()  # no request is in flight
        self._idle.set()

    def __len__(self) -> int:
        return len(self.by_id)

    # -- whether another may come

    def check_room(self) -> None:
        if len(self) >= self._limit:
            raise QueueFull(
                f"{len(self)} requests are in flight, and {self._limit} are allowed", "try again later", retry_after=1
            )

    async def check_wait(self, num_tokens: int, timeout: float | None, check_open: Callable[[], None]) -> None:
        """Refuse what would come too late. Until a step has been measured, requests with a time limit are let in one by
        one: the first of a burst shows how long the others would take."""
        if timeout is not None or self._max_wait is not None:
            while not self.forecast.known and any(request.waiting for request in self.by_id.values()):
                self._stepped.clear()
                await self._stepped.wait()
            check_open()
        self.forecast.check(num_tokens, len(self), self._max_wait, timeout)

    # -- as they come and go

    def add(self, request: InFlight) -> None:
        if request.id in self.by_id:
            raise BadRequest(f"a request with id {request.id} is in flight", "give each request an id of its own")
        self.by_id[request.id] = request
        self.num_tokens += request.num_prompt_tokens
        if request.waiting:
            self.forecast.add(request.num_prompt_tokens)
        self._idle.clear()

    def started(self, request: InFlight) -> None:
        """A request has its first output."""
        request.waiting = False
        self.forecast.begun(request.num_prompt_tokens)

    def remove(self, request: InFlight) -> bool:
        """Forget a request that has ended, or left for another engine. -> whether it was here"""
        if self.by_id.pop(request.id, None) is None:
            return False
        self.num_tokens -= request.num_prompt_tokens
        if request.waiting:
            self.forecast.begun(request.num_prompt_tokens)
        self.forecast.ended(time.monotonic(), len(self))
        self._stepped.set()
        if not self.by_id:
            self._idle.set()
        return True

    async def none_left(self) -> None:
        await self._idle.wait()

    def fail_all(self, reason: str, finish_reason: FinishReason = "error") -> None:
        for request in list(self.by_id.values()):
            request.fail(reason, finish_reason)

    # -- what they gain

    def gaining(self, request_id: str) -> InFlight | None:
        """The request of that id, before an event is pushed to it."""
        if (request := self.by_id.get(request_id)) is not None:
            self._changed[request_id] = request
        return request

    def push_tokens(self, tokens: dict[str, list[int]]) -> list[TokenGap]:
        """`StepDone.tokens`: all that most streams get of a step, so it has little to do for each. -> for the
        observer"""
        now, gaps = time.monotonic(), list[TokenGap]()
        for request_id, gained in tokens.items():
            request = self.by_id.get(request_id)
            if isinstance(request, GenerateStream):
                self._changed[request_id] = request
                if (cancel := request.push_tokens(gained, now, gaps)) is not None:
                    self._send(cancel)
        return gaps

    def tell_consumers(self) -> None:
        """Once for all messages that came together: what a stream gained by them is one write."""
        changed, self._changed = self._changed, {}
        for request in changed.values():
            request.on_ready()

    def record_step(self, record: StepRecord) -> None:
        self.forecast.step(record)
        self._stepped.set()
        for request_id in record.admitted:
            if isinstance(stream := self.by_id.get(request_id), GenerateStream):
                stream.live.admit(time.monotonic() - record.seconds)
