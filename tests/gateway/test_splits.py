"""However the network cuts the bytes into pieces, requests, responses and streams are the same."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.gateways import chunk, event
from quire.core.errors import QuireError
from quire.gateway.client_connection import Answering, ClientConnection, ConnectionBounds
from quire.gateway.event_scanner import EventScanner
from quire.gateway.resuming import DeliveredStream, ResumableScanner
from quire.gateway.upstream import ConnectionPool, UpstreamConnection
from quire.gateway.wire import ClientRequest, Headers

cuts = st.lists(st.integers(0, 10_000), max_size=30)


def pieces(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % len(data) for place in places} | {0, len(data)})
    return [data[begin:end] for begin, end in pairwise(ends)]


class Transport:
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written, self.closed, self.reading = b"", False, True

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1)


def on_loop(run: Callable[[], None]) -> None:
    async def ran() -> None:
        run()

    asyncio.run(ran())


BODY = json.dumps({"model": "m", "text": "ä" * 50}).encode()
REQUESTS = (
    b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: h\r\nX-A:  b \r\nContent-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
    + b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n"
    + b"POST /tokenize HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    + chunk(BODY[:7])
    + chunk(BODY[7:])
    + b"0\r\nX-Trailer: 1\r\n\r\n"
)


@settings(max_examples=60, deadline=None)
@given(cuts)
def test_requests_however_they_are_cut(places: list[int]) -> None:
    seen: list[ClientRequest] = []

    def handle(connection: ClientConnection, request: ClientRequest) -> Answering | None:
        seen.append(request)
        connection.end(keep_alive=True)
        return None

    def run() -> None:
        bounds = ConnectionBounds(10, 1 << 20, 1 << 22, 60, 60, 60)
        connection = ClientConnection(handle, bounds, lambda error: None)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        for piece in pieces(REQUESTS, places):
            connection.data_received(piece)
        while connection._waiting:
            connection._begin_next()
        assert bounds.bodies_bytes == 0
        connection.connection_lost(None)
        assert not bounds.connections

    on_loop(run)
    assert [(each.method, each.target, each.body) for each in seen] == [
        ("POST", b"/v1/completions?x=1", BODY),
        ("GET", b"/v1/models", b""),
        ("POST", b"/tokenize", BODY),
    ]
    assert seen[0].headers == [(b"host", b"h"), (b"x-a", b"b"), (b"content-length", b"%d" % len(BODY))]
    assert (b"x-trailer", b"1") not in seen[2].headers


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), cuts)
def test_no_bytes_of_a_client_break_a_connection(data: bytes, places: list[int]) -> None:
    refused: list[QuireError] = []

    def run() -> None:
        bounds = ConnectionBounds(10, 100, 1000, 60, 60, 60)
        connection = ClientConnection(lambda made, request: made.end(True), bounds, refused.append)
        transport = Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        for piece in pieces(data, places) if data else []:
            connection.data_received(piece)
        connection.connection_lost(None)
        assert transport.closed == bool(refused) and bounds.bodies_bytes == 0
        assert len(refused) <= 1 and transport.written.count(b"HTTP/1.1 ") == len(refused)

    on_loop(run)


class Kept:
    """Implements `Sink`."""

    def __init__(self) -> None:
        self.status, self.data, self.ends = 0, b"", []

    def response_began(self, status: int, headers: Headers, length: int | None) -> None:
        self.status = status

    def response_data(self, data: bytes) -> None:
        self.data += data

    def response_ended(self) -> None:
        self.ends.append("ended")

    def upstream_failed(self, reason: str, is_stale: bool) -> None:
        self.ends.append("failed")


def received(data: bytes, places: list[int], lost: bool = False) -> Kept:
    sink = Kept()

    def run() -> None:
        connection = UpstreamConnection(ConnectionPool("http://127.0.0.1:1", 1.0))
        connection.connection_made(Transport())  # type: ignore[arg-type]
        connection.send(b"", b"", sink)
        for piece in pieces(data, places) if data else []:
            if not sink.ends:
                connection.data_received(piece)
        if lost:
            connection.connection_lost(None)

    on_loop(run)
    return sink


@settings(max_examples=60, deadline=None)
@given(cuts)
def test_responses_however_they_are_cut(places: list[int]) -> None:
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    sink = received(head + chunk(b"abc") + chunk(b"def" * 100) + b"0\r\n\r\n", places)
    assert (sink.status, sink.data, sink.ends) == (200, b"abc" + b"def" * 100, ["ended"])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.booleans(), cuts)
def test_every_response_ends_once_whatever_its_bytes_are(data: bytes, is_http: bool, places: list[int]) -> None:
    assert len(received(b"HTTP/1.1 200 OK\r\n" * is_http + data, places, lost=True).ends) == 1


def test_a_connection_that_was_paused_at_its_end_is_read_again() -> None:
    """The last piece of a response may be what was too much for its client."""

    def run() -> None:
        pool, transport = ConnectionPool("http://127.0.0.1:1", 1.0), Transport()
        connection = UpstreamConnection(pool)
        connection.connection_made(transport)  # type: ignore[arg-type]
        sink = Kept()
        sink.response_data = lambda data: connection.pause()  # type: ignore[method-assign]
        connection.send(b"", b"", sink)
        connection.data_received(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
        assert sink.ends == ["ended"] and transport.reading and pool.take() is connection

    on_loop(run)


class Held:
    """Implements `Answering`."""

    is_paused = False

    def client_gone(self) -> None: ...

    def client_paused(self) -> None:
        self.is_paused = True

    def client_resumed(self) -> None:
        self.is_paused = False


def test_a_client_that_has_not_read_the_last_response_is_paused_in_the_next() -> None:
    """Nothing told the next request of a pipeline, so its whole stream was kept in memory."""
    held: list[Held] = []

    def handle(connection: ClientConnection, request: ClientRequest) -> Answering | None:
        held.append(Held())
        return held[-1]

    def run() -> None:
        bounds = ConnectionBounds(10, 1 << 20, 1 << 22, 60, 60, 60)
        connection = ClientConnection(handle, bounds, lambda error: None)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        connection.data_received(b"GET /v1/models HTTP/1.1\r\nHost: h\r\n\r\n" * 2)
        connection.pause_writing()
        connection.end(keep_alive=True)
        connection._begin_next()
        assert [each.is_paused for each in held] == [True, True]
        connection.resume_writing()
        assert not held[1].is_paused
        connection.connection_lost(None)

    on_loop(run)


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"


@settings(max_examples=100, deadline=None)
@given(cuts, st.booleans())
def test_streams_however_they_are_cut(places: list[int], drop_usage: bool) -> None:
    stream = event("a") + b": keep-alive\n\n" + event("b") + event("c") + USAGE + DONE
    scanner = EventScanner(True, drop_usage)
    passed = b"".join(scanner.feed(piece) for piece in pieces(stream, places)) + scanner.rest()
    assert passed == (stream.replace(USAGE, b"") if drop_usage else stream)
    assert scanner.usage and (scanner.usage.prompt, scanner.usage.output) == (9, 3) and scanner.has_ended


@settings(max_examples=100, deadline=None)
@given(cuts, st.integers(0, 10_000))
def test_what_is_passed_of_a_broken_stream_is_what_was_told(places: list[int], cut: int) -> None:
    """Wherever it breaks, the client has whole events, those whose tokens are known, and no comment of the worker."""
    events = [(event("a") + event("b"), [1, 2]), (event("c"), [3]), (b"", [4]), (event("d"), [5, 6])]
    marks = [frames + b": quire " + b",".join(b"%d" % token for token in tokens) + b"\n\n" for frames, tokens in events]
    stream = b"".join(marks) + event("end") + USAGE + DONE
    delivered = DeliveredStream.begin()
    scanner = ResumableScanner(delivered, drop_usage=True)
    broken = stream[: cut % (len(stream) + 1)]
    passed = b"".join(scanner.feed(piece) for piece in (pieces(broken, places) if broken else []))
    count = len(delivered.events)
    assert delivered.events == [tokens for _, tokens in events[:count]]
    assert passed == b"".join(frames for frames, _ in events[:count])
    scanner.break_off()
    rest = b"".join(marks[count:]) + event("end") + USAGE + DONE
    passed += scanner.feed(rest) + scanner.rest()
    assert passed == b"".join(frames for frames, _ in events) + event("end") + DONE
    wrapped = json.loads(delivered.wrap(b'{"a": 1}'))
    assert wrapped["body"] == {"a": 1} and wrapped["resume"]["events"] == [[1, 2], [3], [4], [5, 6]]
