"""SIGHUP: the whole configuration is taken over, or none of it; what is in flight goes on."""

import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gateway.gateways import Asked, RunningGateway, Upstream, answers, gateway, upstreams, wait_for
from quire.gateway.breaker import CircuitBreaker

KEY = '[[keys]]\nname = "k"\nkey = "secret"\n'


def table(upstream: Upstream, name: str, more: str = "") -> str:
    return f'[[workers]]\nurl = "{upstream.url}"\nname = "{name}"\n{more}\n'


def reload(running: RunningGateway, folder: Path, config: str) -> str:
    """-> what the gateway says about it"""
    (folder / "gateway.toml").write_text(config)
    seen = len(running.said)
    running.process.send_signal(signal.SIGHUP)
    wait_for(lambda: re.search("stays as it was|was read again", "".join(running.said[seen:])))
    return "".join(running.said[seen:])


def test_a_worker_that_was_added_by_hand_can_be_written_into_the_file(tmp_path: Path) -> None:
    """It was refused after keys and models of the file had been taken over already."""
    with upstreams(answers("A"), answers("B")) as [one, two], gateway(table(one, "one"), folder=tmp_path) as running:
        running.http.post(f"{running.admin}/workers", json={"url": two.url, "name": "two"})
        wait_for(lambda: running.workers()["two"]["state"] == "ready")
        said = reload(running, tmp_path, table(one, "one") + table(one, "two") + KEY)
        assert "stays as it was: there is a worker two at" in said, "another server has that name"
        assert running.chat().status_code == 200, "no key is needed, as before"
        assert "was read again" in reload(running, tmp_path, table(one, "one") + table(two, "two", "weight = 2") + KEY)
        assert running.workers()["two"]["weight"] == 2 and running.workers()["two"]["state"] == "ready"
        assert running.chat().status_code == 401
        assert "was read again" in reload(running, tmp_path, table(one, "one"))
        assert list(running.workers()) == ["one"], "the file has it no longer"


def test_other_settings_of_the_only_worker_refuse_no_request(tmp_path: Path) -> None:
    """It was forgotten and added anew, and took no requests until its first check had ended."""
    checked, go = threading.Event(), threading.Event()

    with upstreams(answers("A")) as [only], gateway(table(only, "one"), folder=tmp_path) as running:
        probe = only._probe

        def slow(path: str) -> bytes:
            checked.set()
            assert go.wait(20)
            return probe(path)

        only._probe = slow  # type: ignore[method-assign]
        reload(running, tmp_path, table(only, "one", "weight = 3\nmax_in_flight = 7\n"))
        shown = running.workers()["one"]
        assert (shown["weight"], shown["max_in_flight"], shown["state"]) == (3, 7, "ready")
        assert running.chat().status_code == 200
        reload(running, tmp_path, table(only, "one", 'api_key = "new"\n'))
        assert running.workers()["one"]["state"] == "ready"
        assert running.chat().status_code == 200
        assert dict(only.asked[-1].headers)["authorization"] == "Bearer new"
        go.set()


def test_requests_in_flight_are_counted_on_by_a_worker_that_is_changed(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    def waiting(connection: socket.socket, asked: Asked) -> bool:
        begun.set()
        assert go.wait(20)
        return answers("late")(connection, asked)

    with (
        upstreams(waiting) as [only],
        gateway(table(only, "one"), folder=tmp_path) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(running.chat)
        assert begun.wait(20)
        reload(running, tmp_path, table(only, "one", "weight = 3"))
        assert running.workers()["one"]["in_flight"] == 1
        go.set()
        assert "late" in answer.result().text
        wait_for(lambda: running.workers()["one"]["in_flight"] == 0)


def test_a_rotated_audit_log_is_written_anew_although_the_file_is_wrong(tmp_path: Path) -> None:
    """Decisions went to the file that was moved away, and were lost with it."""
    log = tmp_path / "audit.jsonl"
    with upstreams(answers("A")) as [only]:
        config = f'audit_log = "{log}"\n' + table(only, "one")
        with gateway(config, folder=tmp_path) as running:
            for next_config in (config, "nonsense = 1"):
                running.chat()
                wait_for(lambda: '"served"' in log.read_text())
                log.rename(tmp_path / "audit.1")
                reload(running, tmp_path, next_config)
                assert log.read_text() == ""
            running.chat()
            wait_for(lambda: '"served"' in log.read_text())


def test_what_needs_a_restart_is_named(tmp_path: Path) -> None:
    with upstreams(answers("A")) as [only], gateway(table(only, "one"), folder=tmp_path) as running:
        more = 'keep_alive = 5\n[redis]\nurl = "redis://127.0.0.1:1"\n'
        said = reload(running, tmp_path, more + table(only, "one"))
        assert re.search(r"changes of (\w+, )*redis, keep_alive take effect at the next start", said)
        assert "changes of" not in reload(running, tmp_path, more + table(only, "one", "weight = 2"))


def test_faults_are_those_of_the_new_file_also_for_workers_that_stay() -> None:
    breaker = CircuitBreaker(5, 5.0, lambda: 0.0)
    breaker.configure(1, 2.0)
    breaker.failed()
    assert breaker.state == "open"
