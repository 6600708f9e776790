"""Clients that leave, and servers that are told to."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire.server.http.connection import CONTINUE
from quire.server.http.tcp_socket import CannotListen, bind, listen
from quire.server.options import ServerOptions
from server.running import running

TESTS = Path(__file__).parent.parent


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


RECEIVE_BUFFER = 1 << 16  # bytes; a kernel may take 32 MiB before its sender notices


def post(port: int, path: str, body: dict[str, object], *, ends: bool = False) -> socket.socket:
    """A request on a socket of its own, its answer not read. `ends`: and nothing more will be sent on it, which the
    server is told at the same time."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    connection.connect(("127.0.0.1", port))
    connection.sendall(head.encode() + data, socket.MSG_MORE if ends else 0)
    if ends:
        connection.shutdown(socket.SHUT_WR)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["!hang", ["!hang", "!hang", "short"]])
def test_a_client_that_leaves_cancels_its_requests(stream: bool, prompt: object) -> None:
    with running() as server:
        connection = post(server.port, "/v1/completions", {"prompt": prompt, "stream": stream, "max_tokens": 50})
        waiting = 1 if prompt == "!hang" else 2
        eventually(
            lambda: len(server.service.open) == waiting and len(server.service.seen) == (1 if waiting == 1 else 3)
        )
        if stream:
            assert connection.recv(10) == b"HTTP/1.1 2"
        connection.close()
        eventually(lambda: not server.service.open)
        assert server.complete().status_code == 200


def whole(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_side_is_answered(stream: bool) -> None:
    """Also if that takes longer than it takes to ask whether it is there."""
    with running() as server:
        for prompt, most in (("x", 5), ("!slow", 30)):
            body = {"prompt": prompt, "stream": stream, "max_tokens": most}
            with post(server.port, "/v1/completions", body, ends=True) as connection:
                interim, status, rest = whole(connection).partition(b"HTTP/1.1 200")
            assert status and not interim.replace(CONTINUE, b"")
            answer = rest.partition(b"\r\n\r\n")[2]
            assert (b"[DONE]" in answer) if stream else json.loads(answer)["usage"]["completion_tokens"] == most
        assert not server.service.open


def test_a_client_that_ends_its_side_and_leaves_later_cancels_its_request() -> None:
    with running() as server:
        with post(server.port, "/v1/completions", {"prompt": "!hang", "max_tokens": 50}) as connection:
            eventually(lambda: server.service.open)
            connection.shutdown(socket.SHUT_WR)
            asked = b""
            while asked.count(b"100 Continue") < 3:  # as long as it is there
                asked += connection.recv(100)
            assert server.service.open
        eventually(lambda: not server.service.open)
        assert server.complete().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_cancelled_by_its_id(stream: bool) -> None:
    """By the id of the HTTP request, or by that of the answer, which a stream tells before it has ended."""
    with running(ServerOptions(api_key=["one", "two"])) as server, ThreadPoolExecutor(1) as others:
        asked = {"prompt": ["!hang", "!hang"], "stream": stream, "max_tokens": 50}
        mine = {"authorization": "Bearer one", "x-request-id": "mine"}
        answer = others.submit(server.http.post, "/v1/completions", json=asked, headers=mine)
        eventually(lambda: len(server.service.open) == 2)

        def abort(name: str, key: str = "one") -> list[str]:
            body, who = {"request_ids": [name, "nobody"]}, {"authorization": f"Bearer {key}"}
            return server.http.post("/abort_requests", json=body, headers=who).json()["aborted"]

        assert abort("mine", key="two") == [] and len(server.service.open) == 2, "it is not theirs"
        name = server.service.seen[0].id.removesuffix("-0") if stream else "mine"
        assert abort(name) == [name]
        told = answer.result()
        assert told.status_code == (200 if stream else 409)
        error = json.loads(told.text.strip().rpartition("data: ")[2])["error"]
        assert error["code"] == "aborted" and "[DONE]" not in told.text
        assert not server.service.open and abort(name) == []


def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    with running() as server:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        connection.close()
        eventually(lambda: server.metrics.http_requests["/v1/completions", "499"] == 1)
        assert server.complete().status_code == 200


def test_all_prompts_or_none() -> None:
    with running() as server:
        assert server.complete(prompt=["!hang", "!full"]).status_code == 429
        assert not server.service.open


PROGRAM = """
import sys, uvloop
from server.fake_service import FakeService
from quire.client.one_model import OneModel
from quire.server.options import ServerOptions
from quire.server.serve import serve
options = ServerOptions(port=0, drain_timeout=float(sys.argv[1]))
uvloop.run(serve(OneModel(FakeService()), options, on_ready=lambda address: print(address, flush=True)))
"""


@contextmanager
def process(drain_timeout: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    path = os.pathsep.join([str(TESTS), *sys.path])
    arguments = [sys.executable, "-c", PROGRAM, str(drain_timeout)]
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            yield server, server.stdout.readline().strip()
            assert server.wait(10) == 0 and server.stderr.read() == ""
        finally:
            server.kill()


def test_sigterm_lets_streams_finish_and_takes_no_more() -> None:
    with process(30) as (server, url):
        body = {"prompt": "!slow", "stream": True, "max_tokens": 60}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_draining_has_an_end() -> None:
    with (
        process(1) as (server, url),
        httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "!hang", "stream": True}) as response,
    ):
        lines = response.iter_lines()  # kept: when it goes, the connection goes
        next(lines)
        waiting = post(int(url.rpartition(":")[2]), "/v1/completions", {"prompt": "!hang", "max_tokens": 50})
        httpx.get(f"{url}/health")  # answered after the request before it was taken
        server.send_signal(signal.SIGTERM)
        *_, last, _ = lines
        assert "shutting down" in json.loads(last.removeprefix("data: "))["error"]["message"]
        with waiting, waiting.makefile("rb") as answer:
            assert answer.readline().startswith(b"HTTP/1.1 503")


def test_a_second_signal_does_not_wait() -> None:
    with (
        process(100) as (server, url),
        httpx.stream("POST", f"{url}/v1/completions", json={"prompt": "!hang", "stream": True}) as response,
    ):
        lines = response.iter_lines()  # kept: when it goes, the connection goes
        next(lines)
        server.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.wait(0.5)
        server.send_signal(signal.SIGTERM)
        assert server.wait(10) == 0


def test_a_token_is_sent_at_once_and_not_after_nagles_40_ms() -> None:
    with running() as server:

        def seconds() -> float:
            begin = time.perf_counter()
            server.complete(max_tokens=1)
            return time.perf_counter() - begin

        assert any(seconds() < 0.03 for _ in range(200)), "none is quicker, and on a busy machine some are"


def test_a_port_that_is_taken_is_told() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(CannotListen, match="in use"):
        listen(taken)
        bind("127.0.0.1", taken.getsockname()[1])
