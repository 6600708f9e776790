"""Bytes pass through the gateway: every dialect, streams, disconnects, slow readers, bounds."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import httpx
import pytest

from gateway.gateways import (
    SECONDS,
    SSE_HEAD,
    Asked,
    RunningGateway,
    Upstream,
    answers,
    chunk,
    event,
    gateway,
    response,
    streams,
    upstreams,
    wait_for,
)
from server.running import Running, running


@dataclass
class Through:
    gateway: RunningGateway
    server: Running  # behind it
    upstream: Upstream  # another, which serves `m`


@pytest.fixture(scope="module")
def through() -> Iterator[Through]:
    with ExitStack() as stack:
        server = stack.enter_context(running())
        server.service.info.max_model_len = 4096
        [upstream] = stack.enter_context(upstreams(answers()))
        flags = ("--worker", server.url, "--worker", upstream.url)
        yield Through(stack.enter_context(gateway("", *flags)), server, upstream)


MESSAGES = [{"role": "user", "content": "Hello"}]
CALLS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "seed": 1},
    "/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "seed": 1},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4, "seed": 1},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4, "seed": 1},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/invocations": {"prompt": "Hello", "max_tokens": 4, "seed": 1},
    "/generate": {"inputs": "Hello", "parameters": {"max_new_tokens": 4}},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 4, "seed": 1}},
    "/api/generate": {"prompt": "Hello", "stream": False, "options": {"num_predict": 4, "seed": 1}},
    "/completion": {"prompt": "Hello", "n_predict": 4, "seed": 1},
    "/v1/embeddings": {"input": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}


@pytest.mark.parametrize("path", CALLS)
def test_every_dialect_passes(through: Through, path: str) -> None:
    """Without a model in the body too, where the only server with the dialect is asked for by its name."""
    body = {"model": through.server.service.info.name, **CALLS[path]}
    direct = through.server.http.post(path, json=body)
    passed = through.gateway.http.post(through.gateway.url + path, json=body)
    assert passed.status_code == direct.status_code
    assert passed.headers["content-type"] == direct.headers["content-type"]
    assert _lasting(passed.json()) == _lasting(direct.json())


def _lasting(value: object) -> object:
    """Without what is new in every answer."""
    if isinstance(value, dict):
        return {
            k: _lasting(v)
            for k, v in value.items()
            if k not in ("id", "created", "created_at", "timings") and "duration" not in k and "_at" not in k
        }
    return [_lasting(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"]
)
def test_every_dialect_streams(through: Through, path: str) -> None:
    body = {"model": through.server.service.info.name, **CALLS[path], "stream": True}
    direct = through.server.http.post(path, json=body)
    passed = through.gateway.http.post(through.gateway.url + path, json=body)
    assert passed.headers["content-type"] == direct.headers["content-type"]
    assert passed.text.count("\n") == direct.text.count("\n") > 2


def test_models_and_kserve_paths(through: Through) -> None:
    http, url, name = through.gateway.http, through.gateway.url, through.server.service.info.name
    assert {card["id"] for card in http.get(f"{url}/v1/models").json()["data"]} == {"m", name}
    assert http.get(f"{url}/v1/models/{name}").json()["max_model_len"] == 4096
    answer = http.post(
        f"{url}/v2/models/{name}/generate", json={"text_input": "Hello", "parameters": {"max_tokens": 3}}
    )
    assert answer.json()["text_output"]
    assert http.get(f"{url}/health").status_code == http.get(f"{url}/ready").status_code == 200


def test_a_stored_response_is_asked_where_it_is(through: Through) -> None:
    http, url, name = through.gateway.http, through.gateway.url, through.server.service.info.name
    made = http.post(f"{url}/v1/responses", json={"model": name, "input": "Hello", "max_output_tokens": 3}).json()
    assert http.get(f"{url}/v1/responses/{made['id']}").json()["output"] == made["output"]
    after = {"model": name, "input": "More", "max_output_tokens": 3, "previous_response_id": made["id"]}
    assert http.post(f"{url}/v1/responses", json=after).status_code == 200


def test_paths_that_change_a_worker_are_not_passed(through: Through) -> None:
    for path in (
        "/v1/load_lora_adapter",
        "/reset_prefix_cache",
        "/api/pull",
        "/abort_requests",
        "/workers",
        "/metrics",
    ):
        answer = through.gateway.http.post(through.gateway.url + path, json={"model": "m"})
        assert answer.status_code == 404 and answer.json()["error"], path
    elsewhere = through.gateway.http.get(f"{through.gateway.url}/workers")
    assert elsewhere.status_code == 404 and "the admin listener has it" in elsewhere.text
    sleep = through.gateway.http.post(f"{through.gateway.url}/sleep")
    assert sleep.status_code == 404 and "ask the worker itself" in sleep.text


def test_a_streams_events_come_as_they_are_made(through: Through) -> None:
    go = threading.Event()

    def slowly(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(SSE_HEAD + chunk(event("one")))
        assert go.wait(20)
        connection.sendall(chunk(event("two")[:20]))
        connection.sendall(chunk(event("two")[20:]) + b"0\r\n\r\n")
        return True

    through.upstream.script = slowly
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    with through.gateway.http.stream("POST", f"{through.gateway.url}/v1/chat/completions", json=body) as answer:
        parts = answer.iter_raw()
        assert next(parts) == event("one")
        go.set()
        assert b"".join(parts) == event("two")


def test_a_client_that_leaves_cancels_its_request_at_once(through: Through) -> None:
    left = threading.Event()

    def endless(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(SSE_HEAD)
        try:
            while True:
                connection.sendall(chunk(event("more")))
                time.sleep(0.005)
        except OSError:
            left.set()
        return False

    through.upstream.script = endless
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    with through.gateway.http.stream("POST", f"{through.gateway.url}/v1/chat/completions", json=body) as answer:
        next(answer.iter_raw())
    assert left.wait(SECONDS)
    wait_for(lambda: all(worker["in_flight"] == 0 for worker in through.gateway.workers().values()))
    assert through.gateway.metric("requests_total", 'status="499"') >= 1


def test_a_client_that_leaves_before_the_answer_cancels_it(through: Through) -> None:
    arrived, left = threading.Event(), threading.Event()

    def silent(connection: socket.socket, asked: Asked) -> bool:
        arrived.set()
        left.set() if connection.recv(1) == b"" else None
        return False

    through.upstream.script = silent
    with socket.create_connection(("127.0.0.1", through.gateway.port)) as client:
        client.sendall(_request(b'{"model": "m", "messages": []}'))
        assert arrived.wait(SECONDS)
    assert left.wait(SECONDS)


def test_a_slow_reader_stops_its_worker_and_not_the_gateway(through: Through) -> None:
    sent = [0]

    def flood(connection: socket.socket, asked: Asked) -> bool:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        connection.sendall(SSE_HEAD)
        piece = chunk(event("x" * 60_000))
        for _ in range(250):  # 15 MB
            connection.sendall(piece)
            sent[0] += len(piece)
        connection.sendall(b"0\r\n\r\n")
        return True

    through.upstream.script = flood
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(("127.0.0.1", through.gateway.port))
        client.sendall(_request(json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode()))
        wait_for(lambda: sent[0])
        last = -1
        while sent[0] != last:  # until nothing moves any more
            last = sent[0]
            time.sleep(0.2)
        assert last < 10 << 20, "the gateway holds what the client does not read"
        assert through.gateway.http.get(f"{through.gateway.url}/health").status_code == 200
        end = b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            end = end[-8:] + client.recv(1 << 20)
    assert sent[0] > 15_000_000


def _request(body: bytes, head: bytes = b"") -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n%bContent-Length: %d\r\n\r\n" % (head, len(body)) + body


def talk(port: int, sent: bytes) -> bytes:
    """All that is answered until the connection ends."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(sent)
        answer = b""
        while data := client.recv(65536):
            answer += data
    return answer


def test_pipelined_requests_are_answered_in_order(through: Through) -> None:
    def echo(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(response(json.dumps({"said": asked.json["user"]}).encode()))
        return True

    through.upstream.script = echo
    bodies = [json.dumps({"model": "m", "messages": [], "user": str(number)}).encode() for number in range(5)]
    last = _request(json.dumps({"model": "m", "messages": [], "user": "5"}).encode(), b"Connection: close\r\n")
    answer = talk(through.gateway.port, b"".join(map(_request, bodies)) + last)
    assert [answer.find(b'"said": "%d"' % number) for number in range(6)] == sorted(
        answer.find(b'"said": "%d"' % number) for number in range(6)
    )
    assert answer.count(b"HTTP/1.1 200") == 6


def test_http_1_0_gets_no_chunks(through: Through) -> None:
    through.upstream.script = streams("a", "b")
    body = json.dumps({"model": "m", "messages": MESSAGES, "stream": True}).encode()
    answer = talk(through.gateway.port, _request(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, sent = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert sent == event("a") + event("b") + b"data: [DONE]\n\n"


def test_a_chunked_body_and_expect_continue(through: Through) -> None:
    through.upstream.script = answers("chunked")
    body = b'{"model": "m", "messages": []}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    sent = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(body[:9]) + chunk(body[9:]) + b"0\r\n\r\n"
    assert b"chunked" in talk(through.gateway.port, sent)
    assert through.upstream.asked[-1].body == body
    expecting = _request(body, b"Expect: 100-continue\r\nConnection: close\r\n")
    assert talk(through.gateway.port, expecting).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")


SMUGGLED = b"GET /workers HTTP/1.1\r\nHost: x\r\n\r\n"
BAD_REQUESTS = {
    "length and chunked": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": b"Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}" + SMUGGLED,
    "a length with a sign": b"Content-Length: +2\r\n\r\n{}",
    "chunked twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a hidden coding": b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": b"Content-Length : 2\r\n\r\n{}",
    "a bare newline in a header": b"X-A: 1\nX-B: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a null in a header": b"X-A: a\x00b\r\nContent-Length: 2\r\n\r\n{}",
    "a folded header": b"X-A: a\r\n b: c\r\nContent-Length: 2\r\n\r\n{}",
    "two hosts": b"Host: y\r\nContent-Length: 2\r\n\r\n{}",
    "an upgrade": b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "a bad chunk": b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("rest", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_what_could_be_read_in_two_ways_is_refused(through: Through, rest: bytes) -> None:
    num_asked = len(through.upstream.asked)
    answer = talk(through.gateway.port, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + rest)
    assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 4") + answer.count(b"HTTP/1.1 2") == 1, answer
    assert len(through.upstream.asked) == num_asked


@pytest.mark.parametrize(
    "target", ["http://other/v1/models", "*", "/v1/models\x01", "//x", "/v1/chat/completions HTTP/1.1\r\nX:"]
)
def test_targets_are_paths(through: Through, target: str) -> None:
    answer = talk(through.gateway.port, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.split()[1] in (b"400", b"404"), answer


def test_private_and_hop_headers_stay_here(through: Through) -> None:
    through.upstream.script = answers()
    head = b"X-Quire-Resume: evil\r\nConnection: close, X-Secret\r\nX-Secret: 1\r\nTE: trailers\r\nX-Kept: yes\r\n"
    assert b"200" in talk(through.gateway.port, _request(b'{"model": "m"}', head))
    names = dict(through.upstream.asked[-1].headers)
    assert names["x-kept"] == "yes" and names["x-forwarded-for"] == "127.0.0.1"
    assert names["host"] == f"127.0.0.1:{through.upstream.port}"
    assert not names.keys() & {"x-quire-resume", "x-secret", "te", "connection"}


def test_heads_and_bodies_are_bounded(through: Through) -> None:
    port = through.gateway.port
    assert talk(port, b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000).startswith(b"HTTP/1.1 431")
    large = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40000000\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(large)
        answer = b""
        try:
            for _ in range(40):
                client.sendall(b" " * (1 << 20))
        except OSError:
            pass
        with suppress(OSError):
            answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413") or answer == b""
    for body in (b"[1]", b'{"a":', b"\xff", b"[" * 60_000, b'{"model": 1}x'):
        answer = through.gateway.http.post(f"{through.gateway.url}/v1/completions", content=body)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    many = b'{"model": "m", "prompt": [' + b'"",' * 1_100_000 + b'""]}'
    answer = through.gateway.http.post(f"{through.gateway.url}/v1/completions", content=many)
    assert answer.status_code == 400 and "more than 1048576 values" in answer.json()["error"]["message"]
    assert through.gateway.http.get(f"{through.gateway.url}/health").status_code == 200


def test_errors_have_the_shape_of_their_dialect(through: Through) -> None:
    post, url = through.gateway.http.post, through.gateway.url
    assert post(f"{url}/v1/chat/completions", json={"model": "x"}).json()["error"]["code"] == "model_not_found"
    assert post(f"{url}/v1/messages", json={"model": "x"}).json()["type"] == "error"
    assert "no model" in post(f"{url}/api/chat", json={"model": "x"}).json()["error"]


def test_what_a_worker_tells_clients_reaches_them(through: Through) -> None:
    """`x-quire-ignored`, and what a browser asks for before it sends a request."""
    tools = [{"type": "web_search"}]
    asked = {"model": through.server.service.info.name, "input": "Hello", "max_output_tokens": 2, "tools": tools}
    answer = through.gateway.http.post(f"{through.gateway.url}/v1/responses", json=asked)
    assert "web_search" in answer.headers["x-quire-ignored"]
    wanted = {"origin": "https://app.example", "access-control-request-method": "POST"}
    for path, status in (("/v1/responses", 200), ("/api/pull", 404)):
        preflight = through.gateway.http.options(f"{through.gateway.url}{path}", headers=wanted)
        assert preflight.status_code == status
    through.upstream.script = answers()


def test_request_ids_and_head_requests(through: Through) -> None:
    through.upstream.script = answers()
    assert through.gateway.chat(headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert dict(through.upstream.asked[-1].headers)["x-request-id"] == "mine-1"
    assert httpx.head(f"{through.gateway.url}/health").status_code == 200
