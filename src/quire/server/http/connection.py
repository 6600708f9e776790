"""One client's connection, with bounds on what it may send, and on how long it may take to send and to read.

uvicorn has none of these: a head of any length is kept, and who sends a letter a minute, or reads none, stays."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16  # of the request line and the headers
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_INTERVAL_SECONDS = 0.2  # seconds: how often a client that has ended its side is asked whether it is there


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    max_connections: int
    receive_timeout: float  # seconds until a request has come whole
    send_timeout: float  # seconds that an answer may lie unread


class Connection(HttpToolsProtocol):
    """`refused` is told the status and the code of what was answered here, before any route was asked."""

    def __init__(self, bounds: ConnectionLimits, refused: Callable[[int, str], None], **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._bounds, self._refused = bounds, refused
        self._in_head = True
        self._num_head_bytes = 0  # that came before the head was whole
        self._num_header_bytes = 0
        self._arriving = _Timer(self.loop, bounds.receive_timeout, self._not_arrived)
        self._unread = _Timer(self.loop, bounds.send_timeout, lambda: self.transport.abort())
        self._one_sided = _Timer(self.loop, PROBE_INTERVAL_SECONDS, self._ask_whether_there)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            self._refuse(503, "too_many_connections", f"the server has {self._bounds.max_connections} connections")
        else:
            self._arriving.start()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arriving.stop()
        self._unread.stop()
        self._one_sided.stop()
        super().connection_lost(exc)

    # -- what comes in ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._num_head_bytes += len(data)
        if self._in_head and self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "headers_too_large", f"the headers are larger than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        self._in_head, self._num_head_bytes, self._num_header_bytes = True, 0, 0
        self._arriving.start()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Also called for what follows a body in chunks, which counts as well."""
        self._num_header_bytes += len(name) + len(value)
        if self._num_header_bytes > MAX_HEAD_BYTES:
            raise ValueError("too many headers")  # uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()  # refuses some: then there is nobody to answer yet
        self._in_head = False

    def on_message_complete(self) -> None:
        self._arriving.stop()
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open. Some clients (`nc -N`) end their side as soon as they have asked, and
        still read. From here that looks as if they had left; but what is sent to those who have comes back."""
        cycle = self.cycle
        asked = cycle is not None and not cycle.more_body and not cycle.response_started
        if not asked or self.pipeline or self.scheme == "https" or self.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._ask_whether_there()
        return True

    def _ask_whether_there(self) -> None:
        """With an answer that clients pass over, until their own begins."""
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif not self.cycle.response_complete:
            if not self.cycle.response_started:
                self.transport.write(CONTINUE)
            self._one_sided.start()

    def _not_arrived(self) -> None:
        if self.flow.read_paused or self._has_earlier:  # it is the server that lets it wait
            self._arriving.start()
        elif not self._in_head or self._num_head_bytes:
            seconds = self._bounds.receive_timeout
            self._refuse(408, "request_timeout", f"the request did not come within {seconds:g} s")
        else:
            self.transport.close()  # nothing was asked

    @property
    def _has_earlier(self) -> bool:
        """Whether an earlier request of this connection is being answered."""
        return self._in_head and self.cycle is not None and not self.cycle.response_complete

    # -- what goes out ---------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()

    def resume_writing(self) -> None:
        self._unread.stop()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait until the last answer is read
        super().timeout_keep_alive_handler()

    # -- refusals --------------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is not HTTP."""
        self._refuse(400, "invalid_request_error", msg.removesuffix("."))

    def _unsupported_upgrade_warning(self) -> None:
        """Not worth two lines in the log for each time that somebody asks for a WebSocket."""

    def _refuse(self, status: int, code: str, message: str) -> None:
        """An answer, and the end. No answer if that to an earlier request is under way, or this one has had its own."""
        self._arriving.stop()
        self._refused(status, code)
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
        """From now, also if it was started before."""
        self.stop()
        self._handle = self._loop.call_later(self._seconds, self._action)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
