"""A stream goes on at another worker: what it is told, when it waits, and when it ends with an error."""

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from gateway.gateways import (
    SECONDS,
    Asked,
    RunningGateway,
    Script,
    Upstream,
    chunk,
    event,
    gateway,
    response,
    wait_for,
)

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Quire-Resume: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
WORDS = ["one ", "two ", "three ", "four "]  # the whole answer; a token is the number of its word
SENT_AWAY = b'data: {"error":{"message":"the server is shutting down","code":"unavailable"}}\n\n'


def told(number: int) -> bytes:
    return chunk(event(WORDS[number]) + b": quire %d\n\n" % number)


def goes_on(connection: socket.socket, asked: Asked) -> bool:
    """As a server does: it sends what was not delivered."""
    first = len(asked.json["resume"]["events"])  # type: ignore[index]
    rest = b"".join(map(told, range(first, len(WORDS))))
    connection.sendall(HEAD + rest + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    return True


def dies_behind(data: bytes, ends: bytes = b"") -> Script:
    def script(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(HEAD + data + ends)
        return False

    return script


@pytest.fixture(scope="module")
def resumable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, Upstream, Upstream]]:
    """Two workers; `first` is asked first."""
    first, second = (Upstream(goes_on, resumes=True) for _ in range(2))
    config = "[faults]\nhealth_interval = 0.05\nresume_seconds = 1.5\nbreaker_failures = 1000\n"
    config += '[models.m]\npolicy = "session"\n'
    config += f'[[workers]]\nurl = "{first.url}"\nname = "first"\nweight = 1000\n'
    config += f'[[workers]]\nurl = "{second.url}"\nname = "second"\nweight = 0.001\n'
    with gateway(config, folder=tmp_path_factory.mktemp("resumable")) as running:
        yield running, first, second
    first.close()
    second.close()


Resumable = tuple[RunningGateway, Upstream, Upstream]


@pytest.fixture(autouse=True)
def fresh(resumable: Resumable) -> None:
    running, first, second = resumable
    for upstream in (first, second):
        upstream.script, upstream.resumes = goes_on, True
        upstream.asked.clear()
    wait_for(lambda: all(worker["state"] == "ready" for worker in running.workers().values()))


def texts(answer: str) -> list[str]:
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    return [chunk["choices"][0]["delta"]["content"] for chunk in chunks if "choices" in chunk]


def ask(running: RunningGateway, **fields: object) -> str:
    return running.chat(stream=True, user="one session", **fields).text


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        told(0),
        told(0) + told(1)[:-20],  # in the middle of an event
        told(0) + chunk(event("two ")),  # its tokens were not told: it comes again
        told(0) + told(1) + told(2) + told(3),  # the end was not told
        told(0) + chunk(b": keep-alive\n\n"),
    ],
)
def test_the_client_sees_one_whole_stream(resumable: Resumable, broken: bytes) -> None:
    running, first, second = resumable
    first.script = dies_behind(broken)
    answer = ask(running)
    assert texts(answer) == WORDS and answer.endswith("data: [DONE]\n\n") and "quire" not in answer
    [asked], [again] = first.asked, second.asked
    assert again.json["body"] == asked.json["body"]
    before, after = asked.json["resume"], again.json["resume"]
    assert before["events"] == [] and after == {**before, "events": [[n] for n in range(broken.count(b": quire"))]}  # type: ignore[index, dict-item, call-overload]


def test_a_worker_that_shuts_down_sends_its_streams_away(resumable: Resumable) -> None:
    running, first, _ = resumable
    first.script = dies_behind(told(0) + chunk(SENT_AWAY), b"0\r\n\r\n")
    assert texts(ask(running)) == WORDS


def test_an_error_of_the_request_is_passed_on(resumable: Resumable) -> None:
    running, first, second = resumable
    failed = b'data: {"error":{"message":"no","code":"engine_failed"}}\n\n'
    first.script = dies_behind(told(0) + chunk(failed), b"0\r\n\r\n")
    assert "engine_failed" in ask(running) and not second.asked


def test_it_waits_for_a_worker_and_then_ends_with_an_error(resumable: Resumable) -> None:
    running, first, second = resumable
    first.script = second.script = dies_behind(told(0))
    first.asked.clear()

    def once(connection: socket.socket, asked: Asked) -> bool:
        first.healthy = second.healthy = False
        connection.sendall(HEAD + told(0))
        wait_for(lambda: all(worker["state"] == "unhealthy" for worker in running.workers().values()))
        return False

    first.script = once
    answer = ask(running)
    first.healthy = second.healthy = True
    assert texts(answer) == ["one "] and '"bad_upstream"' in answer and "[DONE]" not in answer


def test_a_stream_that_ends_every_worker_is_given_up(resumable: Resumable) -> None:
    running, first, second = resumable
    first.script = second.script = lambda connection, asked: dies_behind(
        told(0) if not asked.json["resume"]["events"] else b""  # type: ignore[index]
    )(connection, asked)
    answer = ask(running)
    assert texts(answer) == ["one "] and '"bad_upstream"' in answer
    assert 2 < len(first.asked) + len(second.asked) <= 6


def test_a_refusal_to_go_on_is_tried_elsewhere(resumable: Resumable) -> None:
    running, first, second = resumable
    first.script = lambda connection, asked: (
        goes_on(connection, asked) if asked.json["resume"]["events"] else dies_behind(told(0))(connection, asked)  # type: ignore[index]
    )
    second.script = lambda connection, asked: connection.sendall(response(b"{}", status=400)) is None
    assert texts(ask(running)) == WORDS and len(second.asked) == 1


def test_only_what_can_be_resumed_is_wrapped(resumable: Resumable) -> None:
    running, first, _ = resumable

    def plain(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(response(b"{}"))
        return True

    first.script = plain
    for fields in ({"stream": False}, {"stream": True, "n": 2}):
        assert running.chat(user="one session", **fields).status_code == 200
        assert "resume" not in first.asked[-1].json and b"x-quire" not in first.asked[-1].head


def test_streams_of_other_servers_are_not_wrapped(tmp_path: Path) -> None:
    other = Upstream(dies_behind(chunk(event("a"))))
    with gateway(f'[[workers]]\nurl = "{other.url}"\n', folder=tmp_path) as running:
        assert '"bad_upstream"' in ask(running)
    assert "resume" not in other.asked[0].json
    other.close()


# ---- a client that comes back, to this gateway or to another


def ids(answer: str) -> list[int]:
    return [int(line[4:]) for line in answer.splitlines() if line.startswith("id: ")]


def ask_named(running: RunningGateway, **headers: str) -> str:
    return running.chat(stream=True, user="one session", headers={"x-request-id": "mine", **headers}).text


def test_a_named_stream_tells_where_it_is_and_goes_on_from_there(resumable: Resumable, tmp_path: Path) -> None:
    running, first, _ = resumable
    whole = ask_named(running)
    assert texts(whole) == WORDS and ids(whole) == [1, 2, 3, 4]
    with gateway(f'[[workers]]\nurl = "{first.url}"\n', folder=tmp_path) as other:
        wait_for(lambda: all(worker["state"] == "ready" for worker in other.workers().values()))
        again = ask_named(other, **{"last-event-id": "2"})
        assert texts(again) == WORDS[2:] and ids(again) == [3, 4] and again.endswith("data: [DONE]\n\n")
        asked = other.chat(stream=True, user="another", headers={"x-request-id": "mine"})
        assert asked.status_code == 200
    before, after, another = (each.json["resume"] for each in first.asked)
    assert before["seed"] == after["seed"] != another["seed"], "the same request has the same seed at every gateway"  # type: ignore[index]
    assert before["id"] == after["id"] and after["events"] == []  # type: ignore[index]


def test_it_survives_its_worker_too_when_it_comes_back(resumable: Resumable) -> None:
    running, first, second = resumable
    first.script = dies_behind(told(0) + told(1))
    answer = ask_named(running, **{"last-event-id": "1"})
    assert texts(answer) == WORDS[1:] and ids(answer) == [2, 3, 4]
    assert second.asked[0].json["resume"]["events"] == [[0], [1]]  # type: ignore[index]


def test_a_place_that_is_not_there_ends_with_an_error(resumable: Resumable) -> None:
    running, first, _ = resumable
    assert "stream_not_found" in ask_named(running, **{"last-event-id": "9"}), "the answer has four tokens"
    two = chunk(event("one two ") + b": quire 0,1\n\n")
    first.script = dies_behind(two)
    answer = ask_named(running, **{"last-event-id": "1"})
    assert "stream_not_found" in answer and not texts(answer), "half of an event cannot be sent"


@pytest.mark.parametrize(
    "headers",
    [{"last-event-id": "1"}, {"x-request-id": "a", "last-event-id": "-1"}, {"x-request-id": "a", "last-event-id": "x"}],
)
def test_a_place_that_cannot_be_is_refused(resumable: Resumable, headers: dict[str, str]) -> None:
    answer = resumable[0].chat(stream=True, headers=headers)
    assert answer.status_code == 400 and "Last-Event-ID" in answer.json()["error"]["message"]


def test_other_servers_cannot_go_on(tmp_path: Path) -> None:
    other = Upstream(dies_behind(chunk(event("a"))))
    with gateway(f'[[workers]]\nurl = "{other.url}"\n', folder=tmp_path) as running:
        answer = running.chat(stream=True, headers={"x-request-id": "a", "last-event-id": "1"})
        assert answer.status_code == 502 and "go on" in answer.json()["error"]["message"]
    other.close()


def test_streams_that_broke_off_at_once_are_spread_although_one_worker_is_idle(tmp_path: Path) -> None:
    """All of them went to the least busy one, such as one that had just come back, and waited for each other there."""
    dies, goes = threading.Event(), threading.Event()
    answers: list[Future[httpx.Response]] = []

    def lost(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(HEAD + told(0))
        dies.wait(SECONDS)
        return False

    def held(connection: socket.socket, asked: Asked) -> bool:
        first = len(asked.json["resume"]["events"])  # type: ignore[index]
        connection.sendall(HEAD if first else HEAD + told(0))
        goes.wait(SECONDS)
        rest = b"".join(map(told, range(1, len(WORDS))))
        connection.sendall(rest + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True

    scripts = {"lost": lost, "busy": held, "idle": held}
    made = {name: Upstream(script, resumes=True) for name, script in scripts.items()}
    tables = "".join(f'[[workers]]\nname = "{name}"\nurl = "{each.url}"\n' for name, each in made.items())
    config = f"[faults]\nhealth_interval = 0.05\n{tables}"
    with gateway(config, folder=tmp_path) as running, ThreadPoolExecutor(12) as pool:

        def fill(name: str, count: int) -> None:
            for other in made:
                running.http.post(f"{running.admin}/workers/{other}/{'resume' if other == name else 'drain'}")
            answers.extend(pool.submit(running.chat, stream=True) for _ in range(count))
            wait_for(lambda: len(made[name].asked) == count)

        fill("busy", 4)
        fill("lost", 8)
        for name in made:
            running.http.post(f"{running.admin}/workers/{name}/resume")
        dies.set()
        wait_for(lambda: len(made["busy"].asked) + len(made["idle"].asked) == 12)
        goes.set()
        assert (len(made["busy"].asked), len(made["idle"].asked)) == (8, 4)
        assert all(texts(answer.result().text) == WORDS for answer in answers)
    for each in made.values():
        each.close()
