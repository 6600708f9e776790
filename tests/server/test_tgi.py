"""The dialect of Text Generation Inference, on a socket, with a service whose answers are known."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.core.structured import Structured
from quire.core.watermark import Watermark
from server.fake_service import EOS, answer
from server.running import Running, running

ANSWER = answer(0, 6)  # to "Hello" and a first special token


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def ask(server: Running, path: str = "/generate", inputs: str = "Hello", **parameters: Any) -> httpx.Response:
    return server.http.post(path, json={"inputs": inputs, "parameters": parameters})


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.removeprefix("data:")) for part in response.text.split("\n\n") if part]


def test_generate_answers_with_the_text_alone(server: Running) -> None:
    assert ask(server).json() == {"generated_text": ANSWER}


def test_the_root_answers_with_a_list_or_a_stream(server: Running) -> None:
    assert ask(server, "/").json() == [{"generated_text": ANSWER}]
    streamed = server.http.post("/", json={"inputs": "Hello", "stream": True})
    assert events(streamed)[-1]["generated_text"] == ANSWER


def test_without_sampling_fields_the_most_likely_token_is_taken(server: Running) -> None:
    ask(server, max_new_tokens=3)
    assert server.service.seen[-1].params.temperature == 0.0
    for sampling in ({"do_sample": True}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"typical_p": 0.5}):
        ask(server, **sampling)
        assert server.service.seen[-1].params.temperature == sampling.get("temperature", 1.0), sampling
    server.http.post("/generate", json={"inputs": "Hello"})
    assert server.service.seen[-1].params.temperature == 1.0, "no parameters at all: it samples"


def test_details_tell_tokens_seed_and_why_it_ended(server: Running) -> None:
    details = ask(server, details=True, max_new_tokens=4, do_sample=True, seed=7, top_n_tokens=2).json()["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 4, 7)
    assert [token["text"] for token in details["tokens"]] == list(ANSWER[:4])
    assert details["tokens"][0] == {"id": ord("S"), "text": "S", "logprob": -0.25, "special": False}
    assert [len(top) for top in details["top_tokens"]] == [2] * 4
    assert details["prefill"] == [] and "best_of_sequences" not in details


def test_ends_are_named_as_there(server: Running) -> None:
    whole = ask(server, details=True).json()["details"]
    assert whole["finish_reason"] == "eos_token" and whole["seed"] is None
    assert whole["tokens"][-1] == {"id": EOS, "text": "</s>", "logprob": -0.25, "special": True}
    stopped = ask(server, details=True, stop=["read"]).json()
    assert stopped["generated_text"] == "Sample 0 read", "the stop sequence is part of the text"
    assert stopped["details"]["finish_reason"] == "stop_sequence"


def test_decoder_input_details_tell_of_the_prompt(server: Running) -> None:
    prefill = ask(server, details=True, decoder_input_details=True).json()["details"]["prefill"]
    assert [token["text"] for token in prefill] == ["<s>", *"Hello"]
    assert [token["logprob"] for token in prefill] == [None] + [-0.25] * 5


def test_best_of_tells_of_the_others(server: Running) -> None:
    reply = ask(server, best_of=3, do_sample=True, details=True).json()
    others = reply["details"]["best_of_sequences"]
    assert sorted([reply["generated_text"], *(other["generated_text"] for other in others)]) == sorted(
        answer(index, 6) for index in range(3)
    )


def test_full_text_and_truncation(server: Running) -> None:
    assert ask(server, return_full_text=True).json()["generated_text"] == "Hello" + ANSWER
    ask(server, truncate=2)
    assert server.service.seen[-1].truncate_prompt_tokens == 2


def test_grammar_and_watermark_reach_the_sampler(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given, kind in (
        ({"type": "json", "value": schema}, "json_schema"),
        ({"type": "json", "value": json.dumps(schema)}, "json_schema"),
        ({"type": "json_schema", "value": {"name": "x", "schema": schema}}, "json_schema"),
        ({"type": "regex", "value": "a+"}, "regex"),
    ):
        assert ask(server, grammar=given, watermark=True).status_code == 200
        params = server.service.seen[-1].params
        assert isinstance(params.structured, Structured) and params.structured.kind == kind
        assert params.watermark == Watermark()
        assert kind == "regex" or json.loads(params.structured.text) == schema


def test_a_stream_has_an_event_for_each_token_and_the_last_has_it_all(server: Running) -> None:
    assert events(ask(server, "/generate_stream"))[-1]["details"] is None, "nobody has asked for them"
    told = events(ask(server, "/generate_stream", top_n_tokens=1, details=True))
    assert [event["index"] for event in told] == list(range(1, len(told) + 1))
    assert "".join(event["token"]["text"] for event in told[:-1]) == ANSWER, "characters of several tokens are whole"
    assert all(event["generated_text"] is None and event["details"] is None for event in told[:-1])
    last = told[-1]
    assert last["generated_text"] == ANSWER and last["token"]["special"]
    assert last["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": len(told),
        "seed": None,
        "input_length": 6,
    }
    assert len(last["top_tokens"]) == 1


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"top_p": 1.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"best_of": 2}, "do_sample"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "seed"),
        ({"top_n_tokens": 21}, "top_n_tokens"),
        ({"grammar": {"type": "json", "value": "{"}}, "grammar.value"),
        ({"grammar": {"type": "ebnf", "value": "x"}}, "grammar.type"),
        ({"adapter_id": "nobody"}, "nobody"),
        ({"frequency_penalty": 3.0}, "frequency_penalty"),
    ],
)
def test_mistakes_are_422(server: Running, parameters: dict[str, Any], said: str) -> None:
    reply = ask(server, **parameters)
    assert reply.status_code == 422 and reply.json()["error_type"] == "validation"
    assert said in reply.json()["error"] and reply.json()["error"].startswith("Input validation error")


def test_other_failures_have_its_codes(server: Running) -> None:
    for inputs, status, kind in (("!full", 429, "overloaded"), ("!fail", 424, "generation"), ("", 422, "validation")):
        reply = ask(server, inputs=inputs)
        assert (reply.status_code, reply.json()["error_type"]) == (status, kind)
    *_, last = events(ask(server, "/generate_stream", inputs="!fail"))
    assert last["error_type"] == "generation"
    assert ask(server, "/generate_stream", best_of=2, do_sample=True).status_code == 422


def test_unknown_fields_are_passed_over(server: Running) -> None:
    assert ask(server, nobody_knows=1).status_code == 200


def test_tokenize_tells_where_tokens_stand(server: Running) -> None:
    """The path is vLLM's too: `inputs` tells them apart."""
    found = server.http.post("/tokenize", json={"inputs": "Hé"}).json()
    assert [(token["id"], token["start"], token["stop"]) for token in found] == [
        (256, 0, 0),
        (ord("H"), 0, 1),
        (0xC3, 1, 2),
        (0xA9, 1, 2),
    ]
    assert server.http.post("/tokenize", json={"inputs": "H", "prompt": "H"}).status_code == 400


def test_info_and_chat_tokenize(server: Running) -> None:
    info = server.http.get("/info").json()
    assert (info["model_id"], info["max_total_tokens"]) == ("fake", 512)
    reply = server.http.post("/chat_tokenize", json={"messages": [{"role": "user", "content": "hé"}]}).json()
    text = reply["templated_text"]
    assert text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(place["text"] for place in reply["tokenize_response"]).replace("éé", "é") == text
    for place in reply["tokenize_response"]:
        assert text[place["start"] : place["stop"]] == place["text"]
    assert server.http.post("/chat_tokenize", json={"messages": []}).status_code == 422
