"""What the model advises is the default of every dialect; a request's own values win, field by field."""

from collections.abc import Iterator
from typing import Any

import pytest

from quire.client.generation_config import GenerationConfig
from quire.core.params import SamplingParams
from server.running import Running, running

ADVICE = {"temperature": 0.3, "top_k": 7, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5, "model": "fake"},
    "/api/chat": {"model": "fake", "messages": MESSAGES, "stream": False},
    "/api/generate": {"model": "fake", "prompt": "Hi", "stream": False},
    "/generate": {"inputs": "Hi", "parameters": {"do_sample": True}},
    "/v2/models/fake/generate": {"text_input": "Hi"},
}
NESTED = {"/api/chat": "options", "/api/generate": "options", "/generate": "parameters"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        server.service.info.generation = GenerationConfig(ADVICE, 100)
        yield server


def asked(server: Running, path: str, **given: Any) -> SamplingParams:
    body = dict(BODIES[path])
    if (place := NESTED.get(path)) is not None:
        body[place] = {**body.get(place, {}), **given}
    else:
        body |= given
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return server.service.seen[-1].params


@pytest.mark.parametrize("path", BODIES)
def test_the_models_advice_is_the_default(server: Running, path: str) -> None:
    params = asked(server, path)
    assert {name: getattr(params, name) for name in ADVICE} == ADVICE


@pytest.mark.parametrize("path", BODIES)
def test_a_requests_own_values_win_field_by_field(server: Running, path: str) -> None:
    params = asked(server, path, temperature=0.9)
    assert {name: getattr(params, name) for name in ADVICE} == {**ADVICE, "temperature": 0.9}


def test_text_generation_inference_stays_greedy_unless_it_samples(server: Running) -> None:
    server.http.post("/generate", json={"inputs": "Hi", "parameters": {"max_new_tokens": 3}})
    params = server.service.seen[-1].params
    assert params.temperature == 0 and params.repetition_penalty == 1


def test_ollamas_defaults_fill_in_what_the_model_does_not_say(server: Running) -> None:
    server.service.info.generation = GenerationConfig({"temperature": 0.3})
    params = asked(server, "/api/chat")
    server.service.info.generation = GenerationConfig(ADVICE, 100)
    assert (params.temperature, params.top_k, params.top_p) == (0.3, 40, 0.9)


def test_models_show_what_is_advised(server: Running) -> None:
    [card] = server.http.get("/v1/models").json()["data"]
    assert card["default_sampling_params"] == {**ADVICE, "max_tokens": 100}


def test_load_counts_requests_in_flight_and_prefixes_are_forgotten(server: Running) -> None:
    assert server.http.get("/load").json() == {"server_load": 0}
    body = {"prompt": "!hang", "stream": True, "max_tokens": 9}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()  # kept: without it, the response is closed
        next(lines)
        assert server.http.get("/load").json() == {"server_load": 1}
        assert server.http.post("/reset_prefix_cache").json() == {"success": False}
    for _ in range(500):  # the stream is closed when the server notices that its client has left
        if server.http.post("/reset_prefix_cache").json()["success"]:
            break
    else:
        pytest.fail("the request is still in flight")
    assert server.http.get("/load").json() == {"server_load": 0}
    assert server.service.reset_tenants[-1] == ""
