"""Gateways as workers of gateways, and workers that lead back to where a request came from."""

import socket
from pathlib import Path

from gateway.gateways import answers, gateway, upstreams, wait_for

CONFIG = "[faults]\nhealth_interval = 0.1\n"


def table(url: str, name: str) -> str:
    return f'[[workers]]\nurl = "{url}"\nname = "{name}"\n'


def test_a_gateway_can_be_the_worker_of_another(tmp_path: Path) -> None:
    with (
        upstreams(answers("deep")) as [engine],
        gateway("", "--worker", engine.url) as inner,
        gateway(CONFIG + table(inner.url, "inner"), folder=tmp_path) as outer,
    ):
        headers = {"via": "1.1 proxy.example"}
        assert "deep" in outer.chat(headers=headers).text
        passed = [value for name, value in engine.asked[0].headers if name == "via"]
        assert len(passed) == 1 and passed[0].startswith("1.1 proxy.example, 1.1 quire-")
        assert len(set(passed[0].split(", "))) == 3, "the client's proxy, and both gateways"


def test_a_gateway_is_no_worker_of_itself(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = CONFIG + table(f"http://127.0.0.1:{port}", "itself")
    with gateway(config, "--port", str(port), folder=tmp_path) as running:
        wait_for(lambda: any("itself is unhealthy: it leads back to this gateway" in line for line in running.said))
        assert running.chat().status_code == 404, "it never asks itself for models"


def test_a_loop_of_gateways_ends_with_an_error_and_not_where_another_worker_is(tmp_path: Path) -> None:
    """Each has the other as a worker, as one might write it so that they help each other."""
    with (
        upstreams(answers("mine"), answers("others")) as [mine, others],
        gateway("", "--worker", others.url) as second,
        gateway(CONFIG + table(mine.url, "engine") + table(second.url, "second"), folder=tmp_path) as first,
    ):
        added = second.http.post(f"{second.admin}/workers", json={"url": first.url, "name": "first"})
        assert added.status_code == 201
        for running in (first, second):
            wait_for(lambda running=running: running.metric("worker_ready") == 2)  # type: ignore[misc]
        assert {first.chat().status_code for _ in range(20)} == {200}
        assert len(mine.asked) + len(others.asked) == 20, "none is answered twice"
        for name, running in (("engine", first), (others.url.removeprefix("http://"), second)):
            assert running.http.post(f"{running.admin}/workers/{name}/drain").status_code == 200
        answer = first.chat()
        assert answer.status_code == 508 and answer.json()["error"]["code"] == "loop_detected"
        assert {worker["breaker"] for worker in first.workers().values()} == {"closed"}
