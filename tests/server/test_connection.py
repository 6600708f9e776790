"""Clients that send too much, too slowly, or do not read."""

import asyncio
import gc
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from quire.server.http.connection import Connection
from quire.server.options import ServerOptions
from server.running import Running, running
from server.test_leaving import eventually, post

QUICK = ServerOptions(receive_timeout=0.3, send_timeout=0.3)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@contextmanager
def connection(server: Running) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as made:
        yield made


def answer(made: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := made.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_connections() -> int:
    return sum(type(each) is Connection for each in gc.get_objects())


@pytest.mark.usefixtures("no_collector")
def test_a_closed_connection_leaves_nothing_to_the_garbage_collector() -> None:
    """It stops all streams for as long as it takes, and would have thousands of objects to look through."""
    bodies = [b'{"prompt": "x", "max_tokens": 3}', b'{"prompt": "x", "max_tokens": 3, "stream": true}', b"{"]
    with running() as server:
        before = num_connections()
        for body in bodies:
            with connection(server) as made:
                made.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                assert answer(made)
        with connection(server) as made:
            made.sendall(HEAD)
        eventually(lambda: num_connections() <= before, 20)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),  # nothing was asked
        (b"POST /v1/compl", b"HTTP/1.1 408"),
        (HEAD + b"X-A: b", b"HTTP/1.1 408"),
        (HEAD + b"Content-Length: 20\r\n\r\n{", b"HTTP/1.1 408"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"HTTP/1.1 408"),
    ],
)
def test_a_request_has_to_come_in_time(sent: bytes, status: bytes) -> None:
    with running(QUICK) as server, connection(server) as made:
        made.sendall(sent)
        assert answer(made)[:12] == status
        assert server.metrics.http_requests["none", "408"] == bool(status)
        eventually(lambda: server.complete().status_code == 200)  # its own head and body may come apart


def test_letter_by_letter_is_not_in_time_either() -> None:
    with running(QUICK) as server, connection(server) as made, pytest.raises(OSError):
        for letter in HEAD * 100:
            made.sendall(bytes([letter]))
            time.sleep(0.01)


def test_a_second_request_on_a_connection_has_its_own_time() -> None:
    with running(QUICK) as server, connection(server) as made:
        for _ in range(2):
            body = b'{"prompt": "x", "max_tokens": 1}'
            made.sendall(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            told = b""
            while not told.endswith(b"}}}"):
                told += made.recv(65536)
            assert told.startswith(b"HTTP/1.1 200")
            time.sleep(0.4)  # idle, which is allowed for longer
        made.sendall(b"GET /hea")
        assert answer(made).startswith(b"HTTP/1.1 408")


def test_a_request_is_answered_once() -> None:
    with running(replace(QUICK, max_body_bytes=10)) as server, connection(server) as made:
        made.sendall(HEAD + b"Content-Length: 20\r\n\r\n" + b"[" * 15)  # refused, and never sent whole
        told = answer(made)
        assert told.startswith(b"HTTP/1.1 413") and told.count(b"HTTP/1.1") == 1
    with running(QUICK) as server, connection(server) as made:
        body = b'{"prompt": "!slow", "max_tokens": 60, "stream": true}'
        made.sendall(HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(body), body) + b"GET /he")  # the next one: too late
        told = answer(made)
        assert told.startswith(b"HTTP/1.1 200") and told.count(b"HTTP/1.1") == 2
        assert told.index(b"[DONE]") < told.index(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"x" * 400_000, b"HTTP/1.1 431"),
        (HEAD + b"X-A: " + b"b" * 400_000, b"HTTP/1.1 431"),
        (HEAD + b"X-A: b\r\n" * 40_000, b"HTTP/1.1 4"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-A: b\r\n" * 40_000, b"HTTP/1.1 400"),
        (b"nonsense\r\n\r\n", b"HTTP/1.1 400"),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"HTTP/1.1 400"),  # TLS where there is none
    ],
)
def test_heads_have_an_end(sent: bytes, status: bytes) -> None:
    with running() as server, connection(server) as made:
        with suppress(OSError):  # closed while it is being sent
            made.sendall(sent)
        assert answer(made).startswith(status)
        assert server.complete().status_code == 200


@pytest.mark.parametrize(
    ("options", "max_unread"), [(QUICK, 1 << 40), (ServerOptions(), 1 << 20)], ids=["for long", "much"]
)
def test_who_does_not_read_is_disconnected(
    options: ServerOptions, max_unread: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quire.server.http.connection.MAX_UNREAD_BYTES", max_unread)
    with running(options) as server:
        server.service.says = "x" * 100
        made = post(
            server.port,
            "/v1/completions",
            {"prompt": "x", "stream": True, "max_tokens": 10**6, "n": 64, "ignore_eos": True},
        )
        with made:
            eventually(lambda: server.metrics.http_requests["/v1/completions", "200"] == 1)
            assert not server.service.open
    assert "socket.send() raised" not in caplog.text, "what comes after is still written"


def test_who_reads_slowly_is_not_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    def connection_made(self: Connection, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        made_connection(self, transport)

    made_connection = Connection.connection_made
    monkeypatch.setattr(Connection, "connection_made", connection_made)
    with running(QUICK) as server:
        server.service.says = "x" * 100
        while (gap := longest_gap_of_a_slow_reader(server.port)) is not None:
            assert gap > QUICK.send_timeout, "the server has closed the connection"


def longest_gap_of_a_slow_reader(port: int) -> float | None:
    """Seconds between two reads, which a busy machine makes longer. None: all was read."""
    body = {"prompt": "x", "stream": True, "max_tokens": 120, "n": 64, "ignore_eos": True}
    with post(port, "/v1/completions", body) as made:
        told, longest, last = b"", 0.0, time.monotonic()
        while not told.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):  # more wait than are read in 0.3 s
            try:
                part = made.recv(1 << 16)
            except ConnectionResetError:
                part = b""
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
            if not part:
                return longest
            told = told[-20:] + part
            time.sleep(0.04)
    return None


def test_bodies_of_all_requests_together_are_bounded() -> None:
    with running(ServerOptions(max_body_bytes=1000)) as server, ExitStack() as senders:
        for _ in range(16):
            made = senders.enter_context(connection(server))
            made.sendall(HEAD + b"Content-Length: 1000\r\n\r\n" + b"[" * 990)
        eventually(lambda: server.complete(prompt="x" * 400).status_code == 429)
        refused = server.complete(prompt="x" * 400)
        assert "more than 16000 bytes" in refused.json()["error"]["message"] and refused.headers["retry-after"] == "1"
        assert server.http.get("/health").status_code == 200
        senders.close()
        eventually(lambda: server.complete(prompt="x" * 400).status_code == 200)


def test_one_connection_too_many_is_told_so() -> None:
    with (
        running(ServerOptions(max_connections=2)) as server,
        connection(server),
        connection(server),
        connection(server) as third,
    ):
        told = answer(third)
        assert told.startswith(b"HTTP/1.1 503") and b"the server has 2 connections" in told
    with running(ServerOptions(max_connections=1)) as server:
        assert server.complete().status_code == 200


@pytest.mark.parametrize("word", ["", "!burst", "!burst!fail"])
def test_what_is_there_at_the_same_time_is_sent_at_once(word: str) -> None:
    with running() as server:
        body = {"prompt": word, "add_special_tokens": True, "stream": True, "max_tokens": 20}
        with post(server.port, "/v1/completions", body) as made:
            told = b""
            while not told.endswith(b"0\r\n\r\n"):
                told += made.recv(65536)
    sent = re.findall(rb"\r\n[0-9a-f]+\r\n(?=data: )", told)  # each a write
    events = told.count(b"data: {")
    assert (len(sent), events) == {"": (20, 20), "!burst": (1, 20), "!burst!fail": (2, 4)}[word]  # an error by itself
    assert (b'"code":"engine_failed"' in told) == ("!fail" in word)
