"""SGLang's native API, on a socket, with a service whose answers are known."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Thread, current_thread
from typing import Any

import httpx
import pytest

from quire.core.structured import Structured
from quire.server.dialects.sglang import fields
from quire.server.http.body import INLINE_BYTES
from quire.server.options import ServerOptions
from server.fake_service import BOS, EOS, answer
from server.running import Running, running
from server.test_leaving import eventually

ANSWER = answer(0, 6)  # to "Hello" and a first special token


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def post(server: Running, **body: Any) -> httpx.Response:
    return server.http.post("/generate", json=body)


def ask(server: Running, text: Any = "Hello", sampling: Any = None, **more: Any) -> Any:
    response = post(server, text=text, sampling_params=sampling, **more)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """As SGLang's own client reads them."""
    *lines, last = [line for line in response.text.splitlines() if line]
    assert last == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_text_is_answered_with_what_is_known_of_it(server: Running) -> None:
    told = ask(server, rid="mine")
    meta = told.pop("meta_info")
    assert told == {"text": ANSWER, "output_ids": [*ANSWER.encode(), EOS]}
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "stop", "matched": EOS},
        "prompt_tokens": 6,
        "completion_tokens": len(ANSWER.encode()) + 1,
        "cached_tokens": 4,
        "weight_version": "default",
    }


def test_ends_are_named_as_there(server: Running) -> None:
    assert ask(server, sampling={"max_new_tokens": 3})["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    stopped = ask(server, sampling={"stop": "read"})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "read"}
    assert stopped["text"] == "Sample 0 "
    assert ask(server, sampling={"stop": ["read"], "no_stop_trim": True})["text"] == "Sample 0 read"


def test_sampling_params_reach_the_sampler(server: Running) -> None:
    given = {
        "temperature": 0.5,
        "top_k": -1,
        "top_p": 0.9,
        "min_p": 0.1,
        "min_new_tokens": 2,
        "frequency_penalty": 0.25,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.5,
        "stop_token_ids": [7],
        "ignore_eos": False,
        "skip_special_tokens": False,
        "logit_bias": {"5": -1.0},
        "sampling_seed": 9,
        "stop": [],
        "stop_regex": [],
        "spaces_between_special_tokens": True,
    }
    ask(server, sampling=given)
    params = server.service.seen[-1].params
    for name, value in {"min_tokens": 2, "seed": 9, "logit_bias": {5: -1.0}, "max_tokens": 128, "top_k": -1}.items():
        assert getattr(params, name) == value, name
    for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        assert getattr(params, name) == given[name], name


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ({"regex": "a+"}, Structured("regex", "a+")),
        ({"ebnf": 'root ::= "a"'}, Structured("grammar", 'root ::= "a"')),
        ({"json_schema": '{"type": "object"}'}, Structured("json_schema", '{"type": "object"}')),
        ({"json_schema": None, "regex": ""}, None),
    ],
)
def test_structured_output_is_asked_for_by_its_names(
    server: Running, given: dict[str, Any], output: Structured | None
) -> None:
    ask(server, sampling=given)
    assert server.service.seen[-1].params.structured == output


def test_prompts_in_a_list_are_answered_with_a_list(server: Running) -> None:
    told = ask(server, ["Hello", "Hi"], [{"max_new_tokens": 2}, {"max_new_tokens": 3}], rid="run")
    assert [each["meta_info"]["id"] for each in told] == ["run_0", "run_1"]
    assert [len(each["output_ids"]) for each in told] == [2, 3]
    assert len(ask(server, ["Hello"])) == 1, "a list of one is a list"
    assert [each["text"] for each in ask(server, sampling={"n": 2})] == [answer(0, 6), answer(1, 6)]


def test_ids_are_taken_as_they_are(server: Running) -> None:
    told = post(server, input_ids=[BOS, *b"Hello"]).json()
    assert (told["text"], told["meta_info"]["prompt_tokens"]) == (ANSWER, 6)
    assert [each["meta_info"]["prompt_tokens"] for each in post(server, input_ids=[[65], [65, 66]]).json()] == [1, 2]


def test_a_stream_sends_all_of_the_text_again_and_again(server: Running) -> None:
    """SGLang's client cuts off what it has seen."""
    told, seen = chunks(post(server, text="Hello", stream=True)), ""
    for chunk in told:
        assert chunk["text"].startswith(seen) and "index" not in chunk
        seen = chunk["text"]
    assert seen == ANSWER and told[-1]["output_ids"] == [*ANSWER.encode(), EOS]
    assert [chunk["meta_info"]["finish_reason"] for chunk in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_streams_of_several_are_numbered(server: Running) -> None:
    told = chunks(post(server, text=["Hello", "Hello"], sampling_params={"n": 2}, stream=True))
    last = {chunk["index"]: chunk["text"] for chunk in told}
    assert last == {index: answer(index % 2, 6) for index in range(4)}


def test_no_new_tokens_only_read_the_prompt(server: Running) -> None:
    """`cache_prefix` of SGLang's client asks so."""
    told = ask(server, sampling={"max_new_tokens": 0})
    assert (told["text"], told["output_ids"]) == ("", [])
    assert told["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert told["meta_info"]["completion_tokens"] == 0 and told["meta_info"]["prompt_tokens"] == 6
    streamed = chunks(post(server, text="Hello", sampling_params={"max_new_tokens": 0}, stream=True))
    assert {chunk["text"] for chunk in streamed} == {""}


def test_logprobs_of_output_and_prompt(server: Running) -> None:
    meta = ask(server, sampling={"max_new_tokens": 2}, return_logprob=True)["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.25, ord("S"), None], [-0.25, ord("a"), None]]
    assert meta["input_token_logprobs"] == [] and "output_top_logprobs" not in meta
    meta = ask(
        server,
        sampling={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=3,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )["meta_info"]
    assert meta["input_token_logprobs"] == [[None, ord("l"), "l"], [-0.25, ord("l"), "l"], [-0.25, ord("o"), "o"]]
    assert meta["input_top_logprobs"][0] is None
    assert meta["input_top_logprobs"][1:] == [
        [[-0.25, ord("l"), "l"], [-2.0, ord("m"), "m"]],
        [[-0.25, ord("o"), "o"], [-2.0, ord("p"), "p"]],
    ]
    assert meta["output_top_logprobs"] == [[[-0.25, ord("S"), "S"], [-2.0, ord("T"), "T"]]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"text": "Hi", "input_ids": [1]}, "text and input_ids are both given"),
        ({"text": None}, "text is missing"),
        ({"text": []}, "text is empty"),
        ({"text": "Hi", "sampling_params": {"max_tokens": 3}}, "sampling_params.max_tokens"),
        ({"text": "Hi", "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"text": "Hi", "sampling_params": {"regex": "a", "ebnf": "b"}}, "regex and ebnf"),
        ({"text": "Hi", "sampling_params": {"json_schema": "{"}}, "json_schema is not a JSON schema"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params has 1 values, and there are 2 prompts"),
        ({"text": "Hi", "image_data": "cat.png"}, "image_data"),
        ({"text": "Hi", "lora_path": "nobody"}, "nobody"),
        ({"text": ["a", "b"], "lora_path": ["one", "two"]}, "several adapters"),
        ({"text": "Hi", "stream": True, "return_logprob": True, "top_logprobs_num": 1}, "top_logprobs_num"),
        ({"text": "Hi", "rid": "x" * 129}, "129 characters"),
    ],
)
def test_mistakes_are_told_in_its_shape(server: Running, body: dict[str, Any], said: str) -> None:
    response = post(server, **body)
    assert response.status_code in (400, 404) and said in response.json()["error"]["message"]


def test_a_stream_that_fails_says_so(server: Running) -> None:
    response = post(server, text="!fail", stream=True)
    last = json.loads(response.text.strip().rpartition("data: ")[2])
    assert "engine failed" in last["error"]["message"]


def test_what_its_clients_ask_first(server: Running) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = server.http.get(path).json()
        assert (info["model_path"], info["is_generation"]) == ("fake", True)
    for path in ("/get_server_info", "/server_info"):
        info = server.http.get(path).json()
        assert (info["max_total_num_tokens"], info["page_size"], info["context_length"]) == (128, 16, 512)
    assert server.http.post("/v1/tokenize", json={"prompt": "Hi"}).json()["tokens"] == [BOS, *b"Hi"]
    assert server.http.post("/v1/detokenize", json={"tokens": [*b"Hi"]}).json()["text"] == "Hi"


def test_flushing_the_cache_is_told_where_prefixes_are_in_use() -> None:
    with running() as server, ThreadPoolExecutor(1) as others:
        assert server.http.post("/flush_cache", json={"empty_cache": True}).status_code == 200
        others.submit(post, server, text="!hang", rid="mine")
        eventually(lambda: server.service.open)
        assert server.http.post("/flush_cache").status_code == 400
        server.http.post("/abort_request", json={"rid": "mine"})


def test_health_generates_a_token_without_a_key() -> None:
    with running(ServerOptions(api_key=["k"])) as server:
        assert server.http.get("/health_generate").status_code == 200
        assert server.service.seen[-1].params.max_tokens == 1
        server.service.state = "restarting"
        assert server.http.get("/health_generate").status_code == 503


def test_large_bodies_are_told_apart_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spy:
        def decode(self, body: bytes) -> Any:
            threads.append(current_thread())
            return decoder.decode(body)

    decoder, threads = fields._prompt, list[Thread]()
    monkeypatch.setattr(fields, "_prompt", Spy())
    with running() as server:
        for padding in ("", "x" * INLINE_BYTES):
            assert post(server, text="Hello", padding=padding).status_code == 200
    assert threads[0] is not threads[1]


def test_a_request_is_aborted_by_its_rid() -> None:
    with running() as server, ThreadPoolExecutor(1) as others:
        asked = others.submit(post, server, text="!hang", rid="mine")
        eventually(lambda: server.service.open)
        assert server.http.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": ["mine"]}
        assert asked.result().status_code == 409
        assert server.http.post("/abort_request", json={"abort_all": True}).status_code == 400
