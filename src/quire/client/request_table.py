"""The requests in flight of one engine, how long another would wait, and which of them may go elsewhere."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from quire.client.forecast import Forecast
from quire.client.inflight import GenerateStream, InFlight
from quire.client.service import Observer, State
from quire.client.submissions import Submissions, is_suspect
from quire.core.errors import BadRequest, QueueFull, Unavailable
from quire.engine.options import EngineOptions


class RequestTable(ABC):
    """The half of an `EngineClient` that counts. Implements what requests tell their owner, but for `cancel`."""

    observer: Observer | None

    def __init__(self, options: EngineOptions, on_open: Callable[[], None]) -> None:
        """`on_open` is called when a new engine has all requests."""
        self.options = options
        self._requests: dict[str, InFlight] = {}
        self._submissions = Submissions(self._requests, on_open)
        self._forecast = Forecast(options.max_num_seqs)
        self.tokens_in_flight = 0  # of prompts and texts
        self._stepped = asyncio.Event()  # a step was measured, or a request has ended
        self._idle = asyncio.Event()  # no request is in flight
        self._idle.set()

    @property
    @abstractmethod
    def state(self) -> State: ...

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        return len(self._requests)

    def has(self, request_id: str) -> bool:
        return request_id in self._requests

    def unsuspected(self) -> list[InFlight]:
        """Requests of which no engine can have died."""
        return [request for request in self._requests.values() if not is_suspect(request)]

    def waiting(self) -> Iterator[GenerateStream]:
        """Requests that no step has begun to compute, the oldest first."""
        for request in self._requests.values():
            if isinstance(request, GenerateStream) and request.waiting and not request.live.admitted:
                yield request

    # -- admission

    def _check_open(self) -> None:
        if self.state in ("draining", "stopped"):
            raise Unavailable("the server is shutting down", "ask another one")
        limit = self.options.max_num_seqs + self.options.max_queued_requests
        if len(self._requests) >= limit:
            raise QueueFull(
                f"{len(self._requests)} requests are in flight, and {limit} are allowed",
                "try again later",
                retry_after=1,
            )

    async def _check_wait(self, num_tokens: int, timeout: float | None) -> None:
        """Refuse what would come too late. Until a step has been measured, requests with a time limit are let in one by
        one: the first of a burst shows how long the others would take."""
        max_wait = self.options.max_wait
        if timeout is not None or max_wait is not None:
            while not self._forecast.known and any(request.waiting for request in self._requests.values()):
                self._stepped.clear()
                await self._stepped.wait()
            self._check_open()
        self._forecast.check(num_tokens, len(self._requests), max_wait, timeout)

    def _begin(self, request: InFlight) -> None:
        if request.id in self._requests:
            raise BadRequest(f"a request with id {request.id} is in flight", "give each request an id of its own")
        self._requests[request.id] = request
        self.tokens_in_flight += request.num_prompt_tokens
        if request.waiting:
            self._forecast.add(request.num_prompt_tokens)
        self._idle.clear()
        try:
            self._submissions.add(request)
        except BaseException:  # the caller is told why; no later engine must hear of it
            self.request_ended(request)
            raise

    # -- what requests in flight say

    def request_started(self, request: InFlight) -> None:
        request.waiting = False
        self._forecast.begun(request.num_prompt_tokens)

    def request_ended(self, request: InFlight) -> None:
        if request.id not in self._requests:
            return
        self._remove(request)
        self._forecast.ended(time.monotonic(), len(self._requests))
        if self.observer and request.record:
            self.observer.request(request.record)

    def _remove(self, request: InFlight) -> None:
        del self._requests[request.id]
        self.tokens_in_flight -= request.num_prompt_tokens
        if request.waiting:
            self._forecast.begun(request.num_prompt_tokens)
        self._stepped.set()
        self._submissions.ended(request)
        if not self._requests:
            self._idle.set()
