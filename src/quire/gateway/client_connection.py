"""A client's connection: requests are parsed here, bounded in size and time, and answered one after the other."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import httptools

from quire.core.errors import BadRequest, BodyTooLarge, QueueFull, QuireError
from quire.gateway.wire import ClientRequest, Headers, error_body, is_clean, whole_response

log = logging.getLogger("quire.gateway")

MAX_HEAD_BYTES = 1 << 16  # request line and headers
MAX_PIPELINED = 64  # requests that one client may send before the first is answered
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HeadTooLarge(QuireError):
    status, code = 431, "headers_too_large"


class RequestTimeout(QuireError):
    status, code = 408, "request_timeout"


class TooManyConnections(QuireError):
    status, code = 503, "too_many_connections"


class Answering(Protocol):
    """What answers the request that is in flight on a connection."""

    def client_gone(self) -> None: ...

    def client_paused(self) -> None:
        """The client reads too slowly: send no more for now."""

    def client_resumed(self) -> None: ...


@dataclass(slots=True)
class ConnectionBounds:
    """Shared by all connections of a listener."""

    max_connections: int
    max_body_bytes: int
    max_bodies_bytes: int  # of all requests in flight
    receive_timeout: float
    send_timeout: float
    keep_alive: float
    connections: set["ClientConnection"] = field(default_factory=set)
    bodies_bytes: int = 0
    draining: bool = False


class ClientConnection(asyncio.Protocol):
    """`handle` is called with each whole request, once the one before it is answered, and returns what answers it, or
    None if it has done so already."""

    def __init__(
        self,
        handle: Callable[["ClientConnection", ClientRequest], Answering | None],
        bounds: ConnectionBounds,
        on_refusal: Callable[[QuireError], None],
    ) -> None:
        self._handle, self._bounds, self._on_refusal = handle, bounds, on_refusal
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._answering: Answering | None = None
        self._busy = False  # a request is in flight
        self._waiting: deque[ClientRequest] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._in_request = False
        self._held_bytes = 0
        self._clear()
        self.peer = b""

    def _clear(self) -> None:
        self._target = b""
        self._headers: Headers = []
        self._num_head_bytes = 0
        self._in_head = True
        self._body: list[bytes] = []
        self._num_body_bytes = 0

    # -- the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]).encode() if isinstance(peer, tuple) else b""
        self._bounds.connections.add(self)
        if len(self._bounds.connections) > self._bounds.max_connections:
            self._refuse(TooManyConnections(f"the gateway has {self._bounds.max_connections} connections"))
        else:
            self._start_timer(self._bounds.keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.connections.discard(self)
        self._stop_timer()
        self._stop_send_timer()
        self._release_bodies()
        self._waiting.clear()
        if self._answering is not None:
            self._answering.client_gone()
            self._answering = None

    def eof_received(self) -> bool:
        return False  # a client that has closed its side is gone: close, and cancel what it asked for

    def pause_writing(self) -> None:
        self._send_timer = self._loop.call_later(self._bounds.send_timeout, self._transport.abort)
        if self._answering is not None:
            self._answering.client_paused()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        if self._answering is not None:
            self._answering.client_resumed()

    # -- receiving

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return None
        was_in_head, was_in_request = self._in_head, self._in_request
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return self._refuse(BadRequest("connections cannot be upgraded", "send HTTP/1.1 requests"))
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            return self._refuse(cause if isinstance(cause, QuireError) else BadRequest("invalid HTTP request"))
        except httptools.HttpParserError:
            return self._refuse(BadRequest("invalid HTTP request"))
        if was_in_head and self._in_head:
            self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            return self._refuse(HeadTooLarge(f"the headers are larger than {MAX_HEAD_BYTES} bytes"))
        if self._in_request and not was_in_request and not self._busy:  # the request is not whole yet
            self._start_timer(self._bounds.receive_timeout)
        return self._begin_next()

    def on_message_begin(self) -> None:
        self._clear()
        self._in_request = True

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers of a chunked body are dropped
            self._headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._in_head, self._num_head_bytes = False, 0
        if not self._target.startswith(b"/") or not is_clean(self._target, self._headers):
            raise BadRequest("invalid HTTP request")
        if [name for name, _ in self._headers].count(b"host") > 1:
            raise BadRequest("the request has several Host headers")
        if (b"expect", b"100-continue") in self._headers and not self._busy:
            self._transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        if self._num_body_bytes > self._bounds.max_body_bytes:
            limit = self._bounds.max_body_bytes
            raise BodyTooLarge(f"the body has more than {limit} bytes", "the operator can raise max_body_bytes")
        self._held_bytes += len(body)
        self._bounds.bodies_bytes += len(body)
        if self._bounds.bodies_bytes > self._bounds.max_bodies_bytes:
            raise QueueFull(f"the bodies of requests in flight have more than {self._bounds.max_bodies_bytes} bytes")
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._in_request, self._in_head = False, True
        is_http10 = self._parser.get_http_version() == "1.0"
        request = ClientRequest(
            method=self._parser.get_method().decode("ascii"),
            target=self._target,
            path=self._target.partition(b"?")[0].decode("latin-1"),
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            keep_alive=self._parser.should_keep_alive() and not is_http10,
            is_http10=is_http10,
        )
        if len(self._waiting) >= MAX_PIPELINED:
            raise BadRequest(f"more than {MAX_PIPELINED} requests wait on one connection")
        self._waiting.append(request)

    def _begin_next(self) -> None:
        if not self._waiting or self._busy or not self.is_open:
            return
        self._stop_timer()
        self._busy = True
        request = self._waiting.popleft()
        try:
            answering = self._handle(self, request)
        except Exception:
            log.exception("a request to %s failed", request.path)
            self._busy = False
            self._refuse(QuireError("the gateway failed on this request"))
            return
        if self._busy:
            self._answering = answering
            if answering is not None and self._send_timer is not None:
                answering.client_paused()  # the response before this one is not read yet

    # -- sending

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def end(self, keep_alive: bool) -> None:
        """The response is written. The next request, if there is one, begins."""
        self._busy, self._answering = False, None
        self._release_bodies()
        if not keep_alive or self._bounds.draining:
            self._transport.close()
        elif self._waiting:
            self._loop.call_soon(self._begin_next)
        else:
            self._start_timer(self._bounds.receive_timeout if self._in_request else self._bounds.keep_alive)

    def abort(self) -> None:
        """Close at once, so that the client sees that its response is not whole."""
        self._busy, self._answering = False, None
        self._transport.abort()

    def close_if_idle(self) -> None:
        if not self._busy:
            self._transport.close()

    def _refuse(self, error: QuireError) -> None:
        """Answer what is no request that can be handled, and close. Nothing goes into a response that has begun."""
        self._on_refusal(error)
        if not self._busy and not self._transport.is_closing():
            path = self._target.partition(b"?")[0].decode("latin-1")
            body = error_body(path, error)
            self._transport.write(whole_response(error.status, body, [], False, b"application/json"))
        self._transport.close()

    def _release_bodies(self) -> None:
        self._bounds.bodies_bytes -= self._held_bytes
        self._held_bytes = 0

    def _timed_out(self) -> None:
        self._timer = None
        if self._in_request and not self._busy:
            seconds = self._bounds.receive_timeout
            self._refuse(RequestTimeout(f"the request did not come within {seconds:g} s"))
        elif not self._busy:
            self._transport.close()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._timed_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
