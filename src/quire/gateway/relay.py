"""The response of one exchange on its way to the client: held until it is whole, or passed on as it comes."""

from typing import Protocol

from quire.core.errors import QuireError
from quire.gateway.client_connection import ClientConnection
from quire.gateway.event_scanner import EventScanner
from quire.gateway.resuming import DeliveredStream, ResumableScanner
from quire.gateway.usage import TokenUsage, read_usage
from quire.gateway.wire import ClientRequest, Headers, error_body, response_head, whole_response

HELD_BYTES = 1 << 20  # of a response that is not streamed: until then nothing is sent, and another worker may be asked
LAST_CHUNK = b"0\r\n\r\n"
SSE = b"text/event-stream"
STREAM_TYPES = (SSE, b"application/x-ndjson")


def scanner_for(media_type: bytes, delivered: DeliveredStream | None, drop_usage: bool) -> EventScanner | None:
    """The scanner of such a response; None unless it is a stream. `delivered`: of one that can go on elsewhere."""
    if not media_type.startswith(STREAM_TYPES):
        return None
    if delivered is not None:
        return ResumableScanner(delivered, drop_usage)
    return EventScanner(media_type.startswith(SSE), drop_usage)


class Answered(Protocol):
    """Whose response it is."""

    @property
    def own_headers(self) -> Headers:
        """The headers that the gateway adds to a response."""

    @property
    def keeps_alive(self) -> bool:
        """Whether the connection goes on behind the response."""


class ResponseRelay:
    def __init__(self, connection: ClientConnection, request: ClientRequest, answered: Answered) -> None:
        self._connection, self._request = connection, request
        self._answered: Answered | None = answered
        self.clear()

    def clear(self) -> None:
        """Nothing of a response is here."""
        self.status = 0
        self.scanner: EventScanner | None = None
        self.is_passing = False  # some of it is with the client
        self._headers: Headers = []
        self._held: list[bytes] = []
        self._num_held = 0
        self._chunked = False

    def begin(self, status: int, headers: Headers, scanner: EventScanner | None) -> None:
        """`scanner`: of a stream, which is passed on from now on."""
        self.status, self._headers, self.scanner = status, headers, scanner
        if scanner is not None:
            self._send_head(None)

    def push(self, data: bytes) -> int:
        """-> how many tokens of a stream went to the client; 0 is also what tells nothing about tokens"""
        if self.scanner is not None:
            before = self.scanner.num_events
            if events := self.scanner.feed(data):
                self._write(events)
                return max(self.scanner.num_events - before, 0)
        elif self.is_passing:
            self._write(data)
        else:
            self._hold(data)
        return 0

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held > HELD_BYTES:
            self._send_head(None)
            self._write(b"".join(self._held))
            self._held = []

    def finish(self) -> bytes:
        """-> the body, where it was held"""
        body = b""
        if self.scanner is not None:
            if rest := self.scanner.rest():
                self._write(rest)
        elif not self.is_passing:
            body = b"".join(self._held)
            self._send_head(body)
        if self._chunked:
            self._connection.write(LAST_CHUNK)
        return body

    def close(self) -> None:
        """Let go of the exchange: it is not asked any more."""
        self._answered = None

    def refuse(self, error: QuireError) -> None:
        """Nothing was sent before."""
        assert self._answered is not None
        extra = self._answered.own_headers
        if (seconds := getattr(error, "retry_after", None)) is not None:
            extra.append((b"retry-after", str(seconds).encode()))
        body = error_body(self._request.path, error)
        keeps_alive = self._answered.keeps_alive
        self._connection.write(whole_response(error.status, body, extra, keeps_alive, b"application/json"))

    def break_off(self, error: QuireError) -> bool:
        """End a stream of events with an error. -> False where the response can only be cut off"""
        if self.scanner is None or not self._chunked:
            return False
        event = error_body(self._request.path, error)
        self._write(b"data: " + event + b"\n\n" if self.scanner.is_sse else event + b"\n")
        self._connection.write(LAST_CHUNK)
        return True

    def usage(self, body: bytes) -> TokenUsage | None:
        """The tokens that the worker says it took, in its stream or in a `body` that was held."""
        return self.scanner.usage if self.scanner is not None else read_usage(body)

    def _send_head(self, body: bytes | None) -> None:
        """With the whole body, where it is there."""
        assert self._answered is not None
        self.is_passing = True
        framing = b"" if body is None else b"content-length: %d" % len(body)
        if body is None and not self._request.is_http10:
            self._chunked, framing = True, b"transfer-encoding: chunked"
        answered = self._answered
        head = response_head(self.status, self._headers, framing, answered.keeps_alive, answered.own_headers)
        self._connection.write(head + body if body else head)

    def _write(self, data: bytes) -> None:
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
