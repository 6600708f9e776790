"""One client's connection, with limits on the size of headers, and timeouts for receiving and sending.

uvicorn has none of these: it keeps a head of any length, and a client that sends or reads nothing stays connected."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 1 << 16  # request line and headers
MAX_UNREAD_BYTES = 1 << 24  # of a stream that comes faster than its client reads: some fifty thousand chunks
STREAM = "quire.stream"  # the name of an extension in ASGI's scope: writes a part of the body
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_INTERVAL_SECONDS = 0.2  # between probes of a client that has closed its sending side


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    receive_timeout: float  # seconds until a request is received whole
    send_timeout: float  # seconds that a response may stay unread


class Connection(HttpToolsProtocol):
    """`on_refusal` gets the status and the error code of a response that is sent here, without a route."""

    def __init__(self, limits: ConnectionLimits, on_refusal: Callable[[int, str], None], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._limits, self._on_refusal = limits, on_refusal
        self._in_head = True
        self._num_head_bytes = 0  # received before the head was complete
        self._num_header_bytes = 0
        self._receive_timer = _Timer(self.loop, limits.receive_timeout, self._receive_timed_out)
        self._send_timer = _Timer(self.loop, limits.send_timeout, self._send_timed_out)
        self._num_streamed = 0  # bytes written by streams
        self._num_read = 0  # of them, when the timer for sending was started
        self._probe_timer = _Timer(self.loop, PROBE_INTERVAL_SECONDS, self._probe)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._refuse(503, "too_many_connections", f"the server has {self._limits.max_connections} connections")
        else:
            self._receive_timer.start()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._receive_timer, self._send_timer, self._probe_timer):
            timer.end()
        # Nothing leads back here: else closed connections wait for the garbage collector, which stops all streams.
        self.scope, self.cycle = {}, None  # type: ignore[assignment,typeddict-item]

    # -- receiving -------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._num_head_bytes += len(data)
        if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "headers_too_large", f"the headers are larger than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head, self._num_head_bytes, self._num_header_bytes = True, 0, 0
        self._receive_timer.start()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for trailers of a chunked body, which count as well."""
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEAD_BYTES:
            raise ValueError("too many headers")  # uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # may refuse the request, before there is a cycle
        self._in_head = False
        extensions: Any = {STREAM: partial(self._stream, ref(self.cycle))}
        self.scope["extensions"] = extensions  # before the application begins

    def on_message_complete(self) -> None:
        self._receive_timer.stop()
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open. Some clients (`nc -N`) close their sending side after the request, and
        read on. A client that is gone looks the same until a write to it fails, so it is probed."""
        cycle = self.cycle
        asked = cycle is not None and not cycle.more_body and not cycle.response_started
        if not asked or self.pipeline or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        """Write an interim response, which clients ignore, until the real one begins."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self.cycle.response_complete:
            if not self.cycle.response_started:
                self.transport.write(CONTINUE)
            self._probe_timer.start()

    def _receive_timed_out(self) -> None:
        if self.flow.read_paused or self._has_earlier:  # the server itself does not read
            self._receive_timer.start()
        elif not self._in_head or self._num_head_bytes:
            seconds = self._limits.receive_timeout
            self._refuse(408, "request_timeout", f"the request did not come within {seconds:g} s")
        else:
            self.transport.close()  # idle: no request has begun

    @property
    def _has_earlier(self) -> bool:
        """Whether an earlier request of this connection is still in flight."""
        return self._in_head and self.cycle is not None and not self.cycle.response_complete

    # -- sending ---------------------------------------------------------------------------------------------------

    def _stream(self, of: ref[RequestResponseCycle], part: bytes) -> None:
        """Write a part of a response that has begun, without an ASGI message and a task. A client that is
        MAX_UNREAD_BYTES behind is disconnected; nothing happens if it is gone."""
        cycle = of()
        if cycle is not None and not cycle.disconnected and not self.transport.is_closing():
            data = b"%x\r\n%b\r\n" % (len(part), part) if cycle.chunked_encoding else part
            self._num_streamed += len(data)
            self.transport.write(data)
            if self.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self.transport.abort()

    def _send_timed_out(self) -> None:
        """A stream goes on being written: whoever has read some of it meanwhile is slow, and not gone."""
        if self._num_streamed - self.transport.get_write_buffer_size() > self._num_read:
            self._start_send_timer()
        else:
            self.transport.abort()

    def _start_send_timer(self) -> None:
        self._num_read = self._num_streamed - self.transport.get_write_buffer_size()
        self._send_timer.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_send_timer()

    def resume_writing(self) -> None:
        self._send_timer.stop()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait until the last response is read
        super().timeout_keep_alive_handler()

    # -- refusals --------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for input that is not HTTP."""
        self._refuse(400, "invalid_request_error", msg.removesuffix("."))

    def _unsupported_upgrade_warning(self) -> None:
        """Requests for a WebSocket are not logged."""

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Send an error and close. No error goes into a response that has begun, of this request or an earlier one."""
        self._receive_timer.stop()
        self._on_refusal(status, code)
        if not self._has_earlier and (self._in_head or not self.cycle.response_started):
            kind = "invalid_request_error" if status < 500 else "server_error"
            body = msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head.encode() + body)
        self.transport.close()


class _Timer:
    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], object]) -> None:
        self._loop, self._seconds, self._action = loop, seconds, action
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start it, or start it again."""
        self.stop()
        self._handle = self._loop.call_later(self._seconds, self._action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def end(self) -> None:
        """It is not started again."""
        self.stop()
        self._action = _nothing


def _nothing() -> None: ...
