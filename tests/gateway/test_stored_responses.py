"""Stored responses are asked for where they are: streamed ones, by aliases, after a restart, by their tenant alone."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.gateways import SSE_HEAD, Asked, RunningGateway, Script, Upstream, chunk, gateway, response, upstreams

CONFIG = """
policy = "round_robin"
[models.nick]
targets = [{model = "m"}]
[[keys]]
name = "alice"
key = "alice-secret"
[[keys]]
name = "bob"
key = "bob-secret"
models = ["nick"]
routes = ["/v1/responses", "/v1/responses/{id}"]
"""


def stores(name: str) -> Script:
    """Responses of this name only."""
    count = iter(range(1000))

    def script(connection: socket.socket, asked: Asked) -> bool:
        previous = str(asked.json.get("previous_response_id") or f"resp_{name}")
        if not previous.startswith(f"resp_{name}") or asked.json["model"] != "m":
            connection.sendall(response(b'{"error": {"code": "not_found"}}', status=404))
            return True
        made = json.dumps({"id": f"resp_{name}{next(count)}", "object": "response"})
        event = f'event: response.created\ndata: {{"type": "response.created", "response": {made}}}\n\n'.encode()
        streamed = SSE_HEAD + chunk(event) + b"0\r\n\r\n"
        connection.sendall(streamed if asked.json.get("stream") else response(made.encode()))
        return True

    return script


def config(made: list[Upstream]) -> str:
    return CONFIG + "".join(f'[[workers]]\nurl = "{each.url}"\nname = "w{i}"\n' for i, each in enumerate(made))


def ask(running: RunningGateway, who: str = "alice", **body: object) -> httpx.Response:
    asked = {"model": "nick", "input": "x", **body}
    headers = {"authorization": f"Bearer {who}-secret"}
    return running.http.post(f"{running.url}/v1/responses", json=asked, headers=headers)


def id_of(answer: httpx.Response) -> str:
    [name] = re.findall(r'"id": "(resp_\w+)"', answer.text)
    return str(name)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningGateway, list[Upstream]]]:
    folder = tmp_path_factory.mktemp("stored")
    with upstreams(*(stores(name) for name in "abcde")) as made, gateway(config(made), folder=folder) as running:
        yield running, made


Stored = tuple[RunningGateway, list[Upstream]]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_goes_on_at_its_worker_also_by_an_alias_and_from_a_stream(stored: Stored, stream: bool) -> None:
    """A pinned worker got the alias instead of its own name, and streamed responses were not remembered."""
    running, made = stored
    for _ in range(6):
        name = id_of(ask(running, stream=stream))
        before = sum(len(each.asked) for each in made)
        assert ask(running, previous_response_id=name).status_code == 200
        assert sum(len(each.asked) for each in made) == before + 1, "no other worker was asked"


def test_a_gateway_that_was_restarted_finds_it(stored: Stored, tmp_path: Path) -> None:
    running, made = stored
    names = [id_of(ask(running)) for _ in range(5)]
    with gateway(config(made), folder=tmp_path) as later:
        assert [ask(later, previous_response_id=name).status_code for name in names] == [200] * 5
        assert ask(later, previous_response_id="resp_none").status_code == 404
        assert all(worker["failures"] == 0 for worker in later.workers().values())


def test_another_tenant_cannot_go_on_from_it(stored: Stored) -> None:
    running, made = stored
    name = id_of(ask(running, "bob"))
    assert ask(running, "bob", previous_response_id=name).status_code == 200
    before = sum(len(each.asked) for each in made)
    assert ask(running, "alice", previous_response_id=name).status_code == 404
    assert sum(len(each.asked) for each in made) == before


def test_a_key_for_some_models_reads_what_it_has_stored(stored: Stored) -> None:
    """Paths without a model were refused as those of a model without a name."""
    running, _ = stored
    name, headers = id_of(ask(running, "bob")), {"authorization": "Bearer bob-secret"}
    got = running.http.get(f"{running.url}/v1/responses/{name}", headers=headers)
    assert got.status_code not in (400, 401, 403), got.text
    assert running.http.post(f"{running.url}/v1/embeddings", json={}, headers=headers).status_code == 403
