"""The Open Inference Protocol, on a socket, with a service whose answers are known."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.client.generation_config import GenerationConfig
from server.fake_service import answer
from server.running import Running, running

ANSWER = answer(0, 6)  # to "Hello" and a first special token
MODEL = "/v2/models/fake"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def generate(server: Running, path: str = f"{MODEL}/generate", **body: Any) -> httpx.Response:
    return server.http.post(path, json={"text_input": "Hello", **body})


def infer(server: Running, *tensors: dict[str, Any], **body: Any) -> httpx.Response:
    return server.http.post(f"{MODEL}/infer", json={"inputs": list(tensors), **body})


def texts(*data: str, name: str = "text_input") -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": list(data)}


def test_the_server_and_its_model_describe_themselves(server: Running) -> None:
    get = server.http.get
    assert get("/v2").json()["name"] == "quire"
    assert get("/v2/health/live").json() == {"live": True} and get("/v2/health/ready").json() == {"ready": True}
    assert get("/v2/models").json() == {"models": ["fake"]}
    for path in (MODEL, f"{MODEL}/versions/1"):
        described = get(path).json()
        assert (described["name"], described["versions"]) == ("fake", ["1"])
        assert [tensor["name"] for tensor in described["outputs"]] == ["text_output"]
        assert get(f"{path}/ready").json() == {"name": "fake", "ready": True}


def test_generate_answers_with_the_text_alone(server: Running) -> None:
    for path in (f"{MODEL}/generate", f"{MODEL}/versions/1/generate"):
        body = generate(server, path, id="7", parameters={"max_tokens": 200}).json()
        assert body == {
            "id": "7",
            "model_name": "fake",
            "model_version": "1",
            "text_output": ANSWER,
            "finish_reason": "stop",
        }


def test_the_output_can_begin_with_the_input(server: Running) -> None:
    body = generate(server, parameters={"max_tokens": 200, "exclude_input_in_output": False}).json()
    assert body["text_output"] == "Hello" + ANSWER


def test_a_stream_is_the_same_text_in_parts(server: Running) -> None:
    streamed = generate(server, f"{MODEL}/generate_stream", parameters={"max_tokens": 200, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(part.removeprefix("data: ")) for part in streamed.text.split("\n\n") if part]
    assert "".join(event["text_output"] for event in events) == ANSWER and len(events) > 10
    assert events[-1]["finish_reason"] == "stop" and "finish_reason" not in events[0]


def test_parameters_may_be_texts_and_stand_beside_the_input(server: Running) -> None:
    words = {"stop_words": "x", "bad_words": ""}
    generate(server, temperature="0.5", parameters={"top_k": "7", "seed": 3}, max_tokens=9, **words)
    params = server.service.seen[-1].params
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.5, 7, 3, 9)
    assert params.stop == ["x"] and params.bad_words == []


def test_the_models_advice_is_the_default(server: Running) -> None:
    server.service.info.generation = GenerationConfig({"temperature": 0.3, "top_p": 0.8})
    generate(server, parameters={"top_p": 0.5})
    params = server.service.seen[-1].params
    server.service.info.generation = GenerationConfig()
    assert (params.temperature, params.top_p) == (0.3, 0.5)


def test_infer_takes_tensors_as_tritons_clients_send_them(server: Running) -> None:
    sampling = texts('{"temperature": 0, "max_tokens": "200"}', name="sampling_parameters")
    stream = {"name": "stream", "datatype": "BOOL", "shape": [1], "data": [False]}
    body = infer(server, texts("Hello", "Hi"), stream, sampling, id="a", outputs=[{"name": "text_output"}]).json()
    assert (body["id"], body["model_name"]) == ("a", "fake")
    [output] = body["outputs"]
    assert output == {"name": "text_output", "datatype": "BYTES", "shape": [2], "data": [ANSWER, answer(0, 3)]}
    assert server.service.seen[-1].params.temperature == 0


def test_infer_takes_a_tensor_of_any_name_and_rows_of_one(server: Running) -> None:
    tensor = {"name": "input-0", "datatype": "BYTES", "shape": [1, 1], "data": [["Hello"]]}
    body = infer(server, tensor, parameters={"max_new_tokens": 200}).json()
    assert body["outputs"][0]["data"] == [ANSWER]


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        (f"{MODEL}/generate", {}, 400, "`text_input` is missing"),
        (f"{MODEL}/generate", {"text_input": 3}, 400, "text_input"),
        (f"{MODEL}/generate", {"text_input": "a", "parameters": {"temprature": 1}}, 400, "did you mean `temperature`"),
        (f"{MODEL}/generate", {"text_input": "a", "parameters": {"temperature": -1}}, 400, "temperature"),
        (f"{MODEL}/generate", {"text_input": "a", "stream": True}, 400, "/generate_stream"),
        ("/v2/models/fakes/generate", {"text_input": "a"}, 404, "did you mean `fake`"),
        (f"{MODEL}/infer", {"inputs": []}, 400, "text_input"),
        (f"{MODEL}/infer", {"inputs": [texts("a"), texts("b", name="image")]}, 400, "`image` is not known"),
        (f"{MODEL}/infer", {"inputs": [texts("a")], "outputs": [{"name": "logits"}]}, 400, "no output `logits`"),
        (f"{MODEL}/infer", {"inputs": [{**texts("a"), "data": [1]}]}, 400, "no text"),
        (f"{MODEL}/infer", {"inputs": [texts("a"), texts("{", name="sampling_parameters")]}, 400, "not JSON"),
        (f"{MODEL}/infer", {"inputs": [texts("a"), texts("a", "b", name="temperature")]}, 400, "2 values"),
        (f"{MODEL}/versions/2/generate", {"text_input": "a"}, 404, "no model"),
    ],
)
def test_what_is_wrong_is_named(server: Running, path: str, body: dict[str, Any], status: int, told: str) -> None:
    response = server.http.post(path, json=body)
    assert response.status_code == status, response.text
    assert told in response.json()["error"]
