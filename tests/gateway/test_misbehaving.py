"""Workers that lie, stall or die: the client gets another worker's answer or a clear error, and the gateway goes on."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from gateway.gateways import (
    SSE_HEAD,
    Asked,
    RunningGateway,
    Script,
    Upstream,
    answers,
    chunk,
    completion,
    event,
    gateway,
    response,
    streams,
    wait_for,
)

CONFIG = """
[faults]
breaker_failures = 1000
response_timeout = 1.0
[queue]
max_seconds = 1
"""


def says(data: bytes, *, keeps: bool = False) -> Script:
    def script(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(data)
        return keeps

    return script


def stalls(data: bytes) -> Script:
    def script(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(data)
        connection.settimeout(20)
        return connection.recv(1) == b"never"  # until the gateway closes

    return script


BODY = completion()
# Of a response that is not HTTP, or not whole: nothing was sent to the client.
BROKEN: dict[str, Script] = {
    "nothing": says(b""),
    "no HTTP": says(b"hello, world\r\n\r\n"),
    "a bad status": says(b"HTTP/1.1 9999 X\r\nContent-Length: 2\r\n\r\n{}"),
    "no such status": says(b"HTTP/1.1 777 X\r\nContent-Length: 2\r\n\r\n{}"),
    "half a head": says(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "a length that is too long": says(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + BODY),
    "a length and chunks": says(
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{} \r\n"
    ),
    "two lengths": says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{} "),
    "a negative length": says(b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n{}"),
    "a bad chunk": says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}"),
    "chunks that do not end": says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"{}")),
    "an endless head": says(b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 20_000),
    "a split header": says(b"HTTP/1.1 200 OK\r\nX-A: a\x01b\r\nContent-Length: 2\r\n\r\n{}"),
    "an upgrade": says(b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"),
    "a refusal": says(response(b"{}", status=503)),
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, dict[str, Upstream]]]:
    """For each way to fail two workers: a model `NAME` at the broken one alone, `both NAME` also at a good one, which
    is asked second."""
    with ExitStack() as stack:
        good = Upstream(answers("good"))
        broken = {name: Upstream(script) for name, script in BROKEN.items()}
        broken |= {name: Upstream(answers()) for name in ("free", "free2")}
        for upstream in (good, *broken.values()):
            stack.callback(upstream.close)
        both = [f"both {name}" for name in broken]
        tables = [f'[[workers]]\nurl = "{good.url}"\nname = "good"\nweight = 1e-9\nmodels = {both!r}']
        for name, upstream in broken.items():
            tables.append(f'[[workers]]\nurl = "{upstream.url}"\nname = "{name}"\nmodels = {[name, f"both {name}"]!r}')
        policies = [f'[models."both {name}"]\npolicy = "least_tokens"' for name in broken]
        config = CONFIG + "\n".join([*tables, *policies])
        running = stack.enter_context(gateway(config, folder=tmp_path_factory.mktemp("gateway")))
        yield running, broken


@pytest.mark.parametrize("name", BROKEN)
def test_another_worker_is_asked_where_nothing_was_sent(
    fleet: tuple[RunningGateway, dict[str, Upstream]], name: str
) -> None:
    running, broken = fleet
    for _ in range(2):  # least_tokens takes turns where all are idle: one of the two asks the broken one first
        answer = running.chat(f"both {name}")
        assert answer.status_code == 200 and "good" in answer.text, answer.text
    assert broken[name].asked


@pytest.mark.parametrize("name", BROKEN)
def test_the_error_is_clear_where_there_is_no_other(
    fleet: tuple[RunningGateway, dict[str, Upstream]], name: str
) -> None:
    answer = fleet[0].chat(name)
    assert answer.status_code == (503 if name == "a refusal" else 502), answer.text
    if name != "a refusal":
        assert answer.json()["error"]["code"] == "bad_upstream" and name in answer.json()["error"]["message"]


def test_more_than_the_length_says_never_reaches_a_client(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    running, broken = fleet
    broken["free"].script = says(response(b"{}") + response(b'{"stolen": true}'), keeps=True)
    for _ in range(3):
        assert running.chat("free").text == "{}"


def test_a_stream_that_dies_ends_with_an_error(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    running, broken = fleet
    broken["free"].script = says(SSE_HEAD + chunk(event("a")) + chunk(event("b")) + chunk(b"data: half"))
    answer = running.chat("free", stream=True)
    assert answer.text.startswith((event("a") + event("b")).decode())
    assert '"bad_upstream"' in answer.text and "half" not in answer.text and "[DONE]" not in answer.text


def test_a_long_body_that_dies_is_cut_off(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    running, broken = fleet
    broken["free"].script = says(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n" + b"x" * 3_000_000)
    with pytest.raises(httpx.RemoteProtocolError):
        running.chat("free")


def test_a_body_that_ends_with_the_connection_passes(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    running, broken = fleet
    broken["free"].script = says(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n" + BODY)
    assert running.chat("free").content == BODY


def test_interim_responses_are_passed_over(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    running, broken = fleet
    broken["free"].script = says(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 X\r\nA: b\r\n\r\n" + response(BODY), keeps=True
    )
    assert running.chat("free").content == BODY


def test_a_silent_worker_is_given_up(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    running, broken = fleet
    broken["free"].script, broken["free2"].script = stalls(b""), stalls(SSE_HEAD + chunk(event("a")))
    answer = running.chat("free")
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "upstream_timeout"
    streamed = running.chat("free2", stream=True)
    assert event("a").decode() in streamed.text and "upstream_timeout" in streamed.text
    wait_for(lambda: all(worker["in_flight"] == 0 for worker in running.workers().values()))


def test_a_deadline_holds_for_workers_that_know_none(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    """Only the queue knew it: a request was answered minutes after its `x-request-timeout`."""
    running, broken = fleet
    broken["free"].script, broken["free2"].script = stalls(b""), stalls(SSE_HEAD + chunk(event("a")))
    failures = running.workers()["free"]["failures"]
    answer = running.chat("free", headers={"x-request-timeout": "0.1"})
    assert answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_passed"
    streamed = running.chat("free2", stream=True, headers={"x-request-timeout": "0.1"})
    assert event("a").decode() in streamed.text and "deadline_passed" in streamed.text
    wait_for(lambda: all(worker["in_flight"] == 0 for worker in running.workers().values()))
    assert running.workers()["free"]["failures"] == failures


def test_idle_connections_that_a_worker_closes_cost_nothing(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    running, broken = fleet
    closed = threading.Event()

    def once(connection: socket.socket, asked: Asked) -> bool:
        """A response that promises to keep the connection, which then is closed."""
        connection.sendall(response(BODY))
        closed.set()
        return False

    broken["free"].script = once
    before = running.workers()["free"]["failures"]
    for _ in range(20):
        assert running.chat("free").status_code == 200
    assert running.workers()["free"]["failures"] == before


def test_streams_of_other_servers(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    """With CRLF, and without chunks."""
    running, broken = fleet
    events = (event("a") + event("b")).replace(b"\n", b"\r\n")
    broken["free"].script = says(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + events)
    assert running.chat("free", stream=True).content == events
    broken["free"].script = streams("a", "b")
    assert running.chat("free", stream=True).content == event("a") + event("b") + b"data: [DONE]\n\n"


def test_nothing_is_left_behind(fleet: tuple[RunningGateway, dict[str, Upstream]]) -> None:
    running, _ = fleet
    wait_for(
        lambda: all(not worker["in_flight"] and not worker["tokens_in_flight"] for worker in running.workers().values())
    )
    wait_for(lambda: running.metric("requests_in_flight") == 0)
    assert running.metric("retries_total") > 0
