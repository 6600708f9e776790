"""A request at one worker: the connection, what is sent there, and the head of its response until it is needed."""

import asyncio
from typing import Protocol

from quire.gateway.event_scanner import is_comment
from quire.gateway.outgoing import OutgoingBody, outgoing_head
from quire.gateway.tenants import Tenants
from quire.gateway.upstream import UpstreamConnection
from quire.gateway.wire import ClientRequest, Headers
from quire.gateway.worker import Worker


class Attempting(Protocol):
    """A request that is sent to workers. It is told what they answer."""

    request: ClientRequest
    prompt_tokens: int
    expected_output: int
    loop: asyncio.AbstractEventLoop

    def told_to_workers(self) -> tuple[str, bytes, float, Tenants, Headers]:
        """What the gateway adds to the heads of requests: id, client, time left, tenants, trace headers."""

    def is_retried(self, status: int) -> bool:
        """Whether another worker is asked, or is being asked, after this status."""

    def answered_first(self, attempt: "Attempt") -> None:
        """The other attempt, if there is one, is cancelled at once."""

    def response_began(self, attempt: "Attempt", status: int, headers: Headers) -> None: ...

    def response_data(self, attempt: "Attempt", data: bytes) -> None: ...

    def response_ended(self, attempt: "Attempt") -> None: ...

    def attempt_failed(self, attempt: "Attempt", reason: str, died: bool) -> None: ...


class Attempt:
    """Implements `Sink`. `holds_head`: another attempt may answer first, so the head waits for what follows it: servers
    send the head of a stream before they have computed anything."""

    def __init__(self, exchange: Attempting, model: str | None, worker: Worker, outgoing: OutgoingBody) -> None:
        self._exchange, self.model, self.worker, self.outgoing = exchange, model, worker, outgoing
        self.holds_head = False
        self._num_tokens = exchange.prompt_tokens + exchange.expected_output
        self._sent_at = exchange.loop.time()
        self._is_paused = self._has_answered = self._has_left = False
        self._head: tuple[int, Headers] | None = None
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        worker.begin(self._num_tokens)

    def connect(self) -> None:
        upstream = self.worker.pool.take()
        if upstream is not None:
            self._send(upstream)
        else:
            self._connecting = self._exchange.loop.create_task(self._connect_new())

    async def _connect_new(self) -> None:
        try:
            upstream = await self.worker.pool.connect()
        except (OSError, TimeoutError, ValueError) as error:  # a name that is no host is a ValueError
            self._connecting = None
            self._exchange.attempt_failed(self, f"cannot be reached ({type(error).__name__})", died=False)
        else:
            self._connecting = None
            self._send(upstream)

    def _send(self, upstream: UpstreamConnection) -> None:
        self._upstream = upstream
        head = outgoing_head(self._exchange.request, self.outgoing, self.worker, *self._exchange.told_to_workers())
        upstream.send(head, self.outgoing.body, self)
        if self._is_paused:
            upstream.pause()

    # -- the response

    def response_began(self, status: int, headers: Headers, length: int | None) -> None:
        self._answered()
        if self.holds_head and not self._exchange.is_retried(status):
            self._head = (status, headers)
        else:
            self._exchange.response_began(self, status, headers)

    def response_data(self, data: bytes) -> None:
        if self._head is not None and is_comment(data):
            return  # a comment of SSE, which keeps the connection alive, is no answer
        if self._head is None or self._is_first():
            self._exchange.response_data(self, data)

    def response_ended(self) -> None:
        if self._head is None or self._is_first():
            self._upstream = None
            self._exchange.response_ended(self)

    def upstream_failed(self, reason: str, is_stale: bool) -> None:
        self._upstream = None
        if is_stale:
            self.connect()
        else:
            self._exchange.attempt_failed(self, reason, died=True)

    def _is_first(self) -> bool:
        """Hand over the head. -> whether what follows it is wanted"""
        assert self._head is not None
        (status, headers), self._head = self._head, None
        self._exchange.answered_first(self)
        self._exchange.response_began(self, status, headers)
        return not self._has_left

    def _answered(self) -> None:
        if not self._has_answered:
            self._has_answered = True
            self.worker.answered(self._exchange.loop.time() - self._sent_at)

    # -- the end

    def pause(self) -> None:
        self._is_paused = True
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._upstream is not None:
            self._upstream.resume()

    def cancel(self) -> None:
        """Tell the worker at once that nothing more is wanted."""
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._upstream is not None:
            self._upstream.cancel()
            self._upstream = None

    def leave(self) -> None:
        """The worker has one request less."""
        if not self._has_left:
            self._has_left = True
            self.worker.end(self._num_tokens)

    def give_up(self) -> None:
        """End an attempt whose answer is not wanted any more. This tells nothing about the worker."""
        self.cancel()
        self.worker.breaker.gave_up()
        self.leave()

    def was_slower(self) -> None:
        """Another attempt answered first. How long this one took counts: or a slow worker would never be noticed."""
        self._answered()
        self.give_up()
