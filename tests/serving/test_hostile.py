"""Hostile requests cost their sender only: beside each, another user's stream goes on and the server stays small.

In `make test` a few of the worst; `make trials` sends all that can be made from /openapi.json."""

import json
import math
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serving.test_serving import SECONDS, Server, start
from serving.worst_bodies import WorstBody, worst_bodies
from trials import LENGTH

pytestmark = pytest.mark.slow

MAX_GAP = 0.25  # seconds between two tokens of the stream beside it
MAX_GROWTH = 300 << 20  # bytes
NUM_ATTEMPTS = 5
NUM_DRAWN = 6  # of the generated bodies, in `make test`
CONTEXT = 2048  # a prompt of 8,192 tokens, to which Ollama's dialect cuts longer ones, takes a slow core a minute

WORDS = b"word " * (24 << 20 >> 2)

NAMED = [
    WorstBody(name, path, lambda body=body: body if isinstance(body, bytes) else json.dumps(body).encode())  # type: ignore[misc]
    for name, path, body in (
        ("stop ids of many prompts", "/v1/completions", {"prompt": ["a"] * 2048, "stop_token_ids": [5] * 66_000}),
        ("bad words", "/v1/completions", {"prompt": "a", "bad_words": [f"w{number}" for number in range(5000)]}),
        ("a model's name", "/v1/completions", {"prompt": "a", "model": "m" * (20 << 20)}),
        ("a field's name", "/v1/completions", {"prompt": "a", "promp" * (4 << 20): 1}),
        ("annotations", "/v1/chat/completions",
         b'{"messages":[{"role":"user","content":"x","annotations":[' + b"[]," * 10_000_000 + b"[]]}]}"),
        ("one message many times", "/v1/messages",
         b'{"model":"smollm2","max_tokens":2,"messages":['
         + b",".join([b'{"role":"user","content":"%b"}' % (b"b" * 700)] * 30_000) + b"]}"),
        ("a text to tokenize", "/tokenize", b'{"prompt":"' + WORDS + b'"}'),
        ("a text to truncate", "/v1/completions",
         b'{"max_tokens":2,"truncate_prompt_tokens":10,"prompt":"' + WORDS + b'"}'),
        ("many prompts with many completions", "/v1/completions", {"prompt": ["a"] * 2048, "n": 128}),
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[Server]:
    server = start("--max-model-len", str(CONTEXT))
    yield server
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(SECONDS) == 0
    server.process.stderr.close()  # type: ignore[union-attr]


class Neighbour:
    """A user whose tokens are streamed all the time, and the largest memory of the server."""

    def __init__(self, server: Server) -> None:
        self._address = ("127.0.0.1", httpx.URL(server.url).port)
        self._server = psutil.Process(server.process.pid)
        self._on, self._streaming = True, threading.Event()
        self._threads = [threading.Thread(target=self._read), threading.Thread(target=self._look)]

    def __enter__(self) -> "Neighbour":
        self.begin()
        for thread in self._threads:
            thread.start()
        assert self._streaming.wait(SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False
        for thread in self._threads:
            thread.join()

    def begin(self) -> None:
        """Measure from now on."""
        self._size = self._peak = self._server.memory_info().rss
        self._gap, self._last = 0.0, time.monotonic()

    @property
    def gap(self) -> float:
        """The longest time between two tokens, also if the second has not come yet."""
        return max(self._gap, time.monotonic() - self._last)

    @property
    def growth(self) -> int:
        return self._peak - self._size

    def _read(self) -> None:
        body = json.dumps({"prompt": "Once", "max_tokens": CONTEXT - 48, "ignore_eos": True, "stream": True}).encode()
        while self._on:
            with socket.create_connection(self._address, timeout=SECONDS) as stream:
                stream.sendall(_request("/v1/completions", body))
                stream.recv(65536)
                self._last = time.monotonic()
                while self._on and stream.recv(65536):
                    self._gap, self._last = self.gap, time.monotonic()
                    self._streaming.set()

    def _look(self) -> None:
        while self._on:
            self._peak = max(self._peak, self._server.memory_info().rss)
            time.sleep(0.005)


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def send(server: Server, sent: bytes) -> int:
    """-> the status; 0 if the connection was closed while it was sent"""
    answer = b""
    with (
        socket.create_connection(("127.0.0.1", httpx.URL(server.url).port), timeout=SECONDS) as made,
        suppress(ConnectionError),
    ):
        made.sendall(sent)
        answer = made.recv(65536)
        while made.recv(1 << 20):
            pass
    return int(answer.split(None, 2)[1]) if answer else 0


def quiet_gap(neighbour: Neighbour) -> float:
    """The largest gap while nothing else is sent: a busy machine has larger ones."""
    neighbour.begin()
    time.sleep(1)
    return neighbour.gap


def assert_costs_its_sender_only(server: Server, bodies: Iterator[WorstBody]) -> None:
    wrong: list[str] = []
    with Neighbour(server) as neighbour:
        quiet = quiet_gap(neighbour)
        for body in bodies:
            gap, sent = math.inf, _request(body.path, body.make())
            for _ in range(NUM_ATTEMPTS):  # other programs on the machine are no fault of the server
                neighbour.begin()
                status = send(server, sent)
                time.sleep(0.05)
                gap, growth = min(gap, neighbour.gap), neighbour.growth
                if gap < max(MAX_GAP, 4 * quiet):
                    break
                quiet = max(quiet, quiet_gap(neighbour))
            measured = f"{body.name}: status {status}, gap {gap:.3f} s, {growth >> 20} MiB"
            if status >= 500 or gap >= max(MAX_GAP, 4 * quiet) or growth >= MAX_GROWTH:
                wrong.append(measured)
            print(measured)
    assert not wrong, "\n".join(wrong)


def test_the_worst_bodies_cost_their_sender_only(server: Server) -> None:
    assert_costs_its_sender_only(server, iter(NAMED))


@pytest.mark.trial
@pytest.mark.timeout(60 * 60)
def test_every_field_at_its_worst_costs_its_sender_only(server: Server) -> None:
    described: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").json()
    bodies = worst_bodies(described)
    if LENGTH == 1:
        bodies = iter(random.sample([*bodies], NUM_DRAWN))
    assert_costs_its_sender_only(server, bodies)
