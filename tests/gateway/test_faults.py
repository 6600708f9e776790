"""Health apart from readiness, circuit breakers, outliers, rolling restarts."""

import asyncio
import concurrent.futures
import socket
import threading
import time
from pathlib import Path

import pytest

from gateway.gateways import Asked, Upstream, answers, gateway, response, streams, upstreams, wait_for
from quire.gateway.breaker import MAX_OPEN_SECONDS, CircuitBreaker
from quire.gateway.config import Faults, WorkerEntry
from quire.gateway.fleet import WorkerFleet
from trials import LENGTH


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_breaker_opens_tries_one_request_and_closes() -> None:
    clock = Clock()
    breaker = CircuitBreaker(3, 5.0, clock)
    for _ in range(2):
        breaker.failed()
    breaker.succeeded()
    for _ in range(3):
        assert breaker.allows
        breaker.begin()
        breaker.failed()
    assert breaker.state == "open" and not breaker.allows
    clock.now += 4.9
    assert not breaker.allows
    clock.now += 0.2
    assert breaker.state == "half_open" and breaker.allows
    breaker.begin()
    assert not breaker.allows, "one at a time"
    breaker.gave_up()
    assert breaker.allows, "a client that left has tried nothing"
    breaker.begin()
    breaker.failed()
    clock.now += 9.9
    assert breaker.state == "open", "twice as long"
    clock.now += 0.2
    breaker.begin()
    breaker.succeeded()
    assert breaker.state == "closed" and breaker.num_opened == 2


def test_a_breaker_never_stays_open_for_longer_than_a_minute() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    breaker.failed()
    for _ in range(10):
        clock.now += MAX_OPEN_SECONDS
        assert breaker.allows
        breaker.begin()
        breaker.failed()


def test_the_slowest_of_three_is_ejected_and_never_one_of_two() -> None:
    async def ejected(*seconds: float) -> list[str]:
        fleet = WorkerFleet(Faults(health_interval=1000), lambda: None, lambda worker: None)
        for number, each in enumerate(seconds):
            worker = fleet.add(WorkerEntry(url=f"http://127.0.0.1:{number + 1}"))
            worker.ready, worker.num_requests = True, 10
            worker.answered(each)
        fleet._eject_outliers()
        opened = [worker.name for worker in fleet.workers if worker.breaker.state == "open"]
        await fleet.close()
        return opened

    assert asyncio.run(ejected(0.1, 0.1, 0.9)) == ["127.0.0.1:3"]
    assert asyncio.run(ejected(0.1, 0.1, 0.3)) == []
    assert asyncio.run(ejected(0.001, 0.001, 0.05)) == [], "quick enough"
    assert asyncio.run(ejected(0.1, 9.0)) == []


CONFIG = """
policy = "round_robin"
[faults]
health_interval = 0.05
breaker_failures = 3
breaker_seconds = 0.3
"""


def table(upstream: Upstream, name: str) -> str:
    return f'[[workers]]\nurl = "{upstream.url}"\nname = "{name}"\n'


def test_a_worker_that_is_not_healthy_gets_nothing_until_it_is(tmp_path: Path) -> None:
    with (
        upstreams(answers("A"), answers("B")) as [first, second],
        gateway(CONFIG + table(first, "a") + table(second, "b"), folder=tmp_path) as running,
    ):
        first.healthy = False
        wait_for(lambda: running.workers()["a"]["state"] == "unhealthy")
        asked = len(first.asked)
        assert all("B" in running.chat().text for _ in range(6))
        assert len(first.asked) == asked
        second.healthy = False
        wait_for(lambda: running.workers()["b"]["state"] == "unhealthy")
        assert running.http.get(f"{running.url}/ready").status_code == 503
        assert running.http.get(f"{running.url}/health").status_code == 200, "the gateway itself lives"
        refused = running.chat()
        assert refused.status_code == 503 and "a is unhealthy" in refused.json()["error"]["message"]
        first.healthy = second.healthy = True
        wait_for(lambda: running.http.get(f"{running.url}/ready").json()["ready_workers"] == 2)
        assert {running.chat().json()["choices"][0]["message"]["content"] for _ in range(4)} == {"A", "B"}


def test_a_breaker_opens_by_itself_and_closes_again(tmp_path: Path) -> None:
    bad = threading.Event()
    bad.set()

    def script(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(response(b"{}", status=500) if bad.is_set() else response(b'{"fine": 1}'))
        return True

    with upstreams(script) as [only], gateway(CONFIG + table(only, "a"), folder=tmp_path) as running:
        assert [running.chat().status_code for _ in range(3)] == [500, 500, 500], "500 is passed on, and not retried"
        assert running.workers()["a"]["breaker"] == "open"
        refused = running.chat()
        assert refused.status_code == 503 and "a is ready, but its breaker is open" in refused.text
        assert len(only.asked) == 3
        bad.clear()
        wait_for(lambda: running.chat().status_code == 200)
        assert running.workers()["a"]["breaker"] == "closed"
        assert running.metric("breaker_opened_total", 'worker="a"') == 1
        assert running.metric("breaker_state", 'state="closed"', 'worker="a"') == 1


def test_a_worker_that_was_away_and_is_back_begins_anew(tmp_path: Path) -> None:
    """Else one request at a time would be tried there until the first has ended: of a stream, that takes long."""
    settings = CONFIG.replace("breaker_seconds = 0.3", "breaker_seconds = 600")
    bad = threading.Event()
    bad.set()

    def script(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(response(b"{}", status=500) if bad.is_set() else response(b'{"fine": 1}'))
        return True

    with upstreams(script) as [only], gateway(settings + table(only, "a"), folder=tmp_path) as running:
        while running.workers()["a"]["breaker"] != "open":
            running.chat()
        bad.clear()
        only.healthy = False
        wait_for(lambda: running.workers()["a"]["state"] == "unhealthy")
        only.healthy = True
        wait_for(lambda: running.workers()["a"]["state"] == "ready")
        assert running.workers()["a"]["breaker"] == "closed" and running.chat().status_code == 200


def test_a_worker_that_is_full_is_not_broken(tmp_path: Path) -> None:
    def full(connection: socket.socket, asked: Asked) -> bool:
        connection.sendall(response(b"{}", status=429, extra="Retry-After: 7\r\n"))
        return True

    with (
        upstreams(full, answers("B")) as [first, second],
        gateway(CONFIG + table(first, "a") + table(second, "b"), folder=tmp_path) as running,
    ):
        assert all("B" in running.chat().text for _ in range(10))
        assert running.workers()["a"]["breaker"] == "closed" and len(first.asked) > 3
        second.script = full
        assert running.chat().headers["retry-after"] == "7", "where all are full, the client is told by a worker"


@pytest.mark.trial
@pytest.mark.timeout(60 * 60)
def test_rolling_restarts_lose_no_request(tmp_path: Path) -> None:
    """Each of three workers in turn is drained, ended, started again at another port and added, under load."""

    def slowly(connection: socket.socket, asked: Asked) -> bool:
        time.sleep(0.01)
        return streams("a", "b", "c")(connection, asked)

    made = [Upstream(slowly) for _ in range(3)]
    with gateway(CONFIG + "".join(table(each, f"w{i}") for i, each in enumerate(made)), folder=tmp_path) as running:
        stop = threading.Event()

        def load() -> list[str]:
            ends = []
            while not stop.is_set():
                answer = running.chat(stream=True)
                ends.append(f"{answer.status_code} {answer.text[-14:]!r}")
            return ends

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(load) for _ in range(4)]
            for turn in range(6 if LENGTH == 1 else 100 * LENGTH):
                name = f"w{turn % 3}"
                assert running.http.delete(f"{running.admin}/workers/{name}").status_code == 200
                made[turn % 3].close()
                made[turn % 3] = Upstream(slowly)
                url = made[turn % 3].url
                assert running.http.post(f"{running.admin}/workers", json={"url": url, "name": name}).status_code == 201
                wait_for(lambda name=name: running.workers()[name]["state"] == "ready")  # type: ignore[misc]
            stop.set()
            ends = [end for each in loads for end in each.result()]
    for upstream in made:
        upstream.close()
    assert set(ends) == {"200 'data: [DONE]\\n\\n'"} and len(ends) > 12


def test_a_gateway_that_ends_lets_streams_end(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def waiting(connection: socket.socket, asked: Asked) -> bool:
        begun.set()
        go.wait(20)
        return streams("late")(connection, asked)

    with (
        upstreams(waiting) as [only],
        gateway(CONFIG + table(only, "a"), folder=tmp_path) as running,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(running.chat, stream=True)
        assert begun.wait(20)
        running.process.terminate()
        time.sleep(0.1)
        go.set()
        assert "late" in answer.result().text
        assert running.process.wait(20) == 0


def test_what_is_wrong_with_a_worker_is_told(tmp_path: Path) -> None:
    """In the log and at /workers: a stranger who has named the wrong port sees why nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent, upstreams(answers(), answers()) as [locked, other]:
        locked.probes["/v1/models"] = response(b'{"error": "no key"}', status=401)
        other.probes["/v1/models"] = response(b"<html>")
        urls = {
            "gone": "http://127.0.0.1:9",
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "locked": locked.url,
            "other": other.url,
        }
        config = CONFIG.replace("[faults]\n", "[faults]\nconnect_timeout = 0.3\n")
        config += "".join(f'[[workers]]\nurl = "{url}"\nname = "{name}"\n' for name, url in urls.items())
        with gateway(config, folder=tmp_path) as running:
            wait_for(lambda: all(each["problem"] for each in running.workers().values()))
            problems = {name: str(each["problem"]) for name, each in running.workers().items()}
            assert problems == {
                "gone": "it cannot be reached (Connection refused)",
                "silent": "it does not answer within 0.3 s",
                "locked": "it answered 401 to /v1/models: give this worker its `api_key`",
                "other": "its answer to /v1/models is not that of OpenAI's API",
            }
            wait_for(lambda: all(any(problem in line for line in running.said) for problem in problems.values()))
            locked.probes.clear()
            wait_for(lambda: running.workers()["locked"]["problem"] == "")
