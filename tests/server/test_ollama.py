"""The dialect of Ollama, on a socket, with a service whose answers are known."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from quire.server.dialects.completion import Completion, CompletionSample
from quire.server.dialects.dialect import Context
from quire.server.dialects.ollama.call import parse_chat
from quire.text.event import TextEvent
from server.fake_service import CHATML, ByteTokenizer, FakeService, answer
from server.running import Running, running

HELLO = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
ANSWER = answer(0, len(HELLO))


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def generate(server: Running, **body: Any) -> httpx.Response:
    return server.http.post("/api/generate", json={"model": "fake", "prompt": "Hello", **body})


def chat(server: Running, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello"}]
    return server.http.post("/api/chat", json={"model": "fake", "messages": messages, **body})


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_it_streams_unless_told_otherwise(server: Running) -> None:
    *told, last = lines(generate(server))
    assert "".join(part["response"] for part in told) == ANSWER
    assert not any(part["done"] for part in told) and last["done"] and last["response"] == ""
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == (
        "stop",
        len(HELLO),
        len(ANSWER.encode()) + 1,
    )
    parts = last["load_duration"] + last["prompt_eval_duration"] + last["eval_duration"]
    assert 0 < parts <= last["total_duration"] < 10e9, "durations are in nanoseconds"
    *told, last = lines(chat(server))
    assert "".join(part["message"]["content"] for part in told) == ANSWER
    assert last["message"] == {"role": "assistant", "content": ""}


def test_whole_answers(server: Running) -> None:
    whole = generate(server, stream=False).json()
    assert (whole["response"], whole["done"], whole["model"]) == (ANSWER, True, "fake")
    whole = chat(server, stream=False, options={"num_predict": 3}).json()
    assert whole["message"] == {"role": "assistant", "content": ANSWER[:3]} and whole["done_reason"] == "length"
    told = chat(server, stream=False, logprobs=True, top_logprobs=2, options={"num_predict": 3}).json()["logprobs"]
    assert [one["token"] for one in told] == list(ANSWER[:3]) and len(told[0]["top_logprobs"]) == 2


def test_a_prompt_goes_through_the_template_unless_it_is_raw(server: Running) -> None:
    generate(server, system="Be brief.")
    assert server.service.seen[-1].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]
    generate(server, raw=True)
    assert server.service.seen[-1].prompt == "Hello" and server.service.seen[-1].messages is None


def test_no_prompt_only_loads_the_model(server: Running) -> None:
    for reply in (generate(server, prompt=""), chat(server, messages=[])):
        [only] = lines(reply)
        assert only["done"] and only["done_reason"] == "load"


@pytest.mark.parametrize("keep_alive", [0, 0.0, "0", "0s", "0m"])
def test_a_model_is_not_unloaded_by_request(server: Running, keep_alive: object) -> None:
    for reply in (generate(server, prompt="", keep_alive=keep_alive), chat(server, keep_alive=keep_alive)):
        assert reply.status_code == 400 and "`keep_alive` is 0" in reply.json()["error"]


def test_models_may_be_asked_to_stay(server: Running) -> None:
    assert all(generate(server, keep_alive=time).status_code == 200 for time in ("10m", -1, 300, "0.5h", None))


def test_options_become_sampling_params(server: Running) -> None:
    generate(server)
    params = server.service.seen[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens, params.seed) == (
        0.8,
        40,
        0.9,
        None,
        None,
    )
    options = {
        "temperature": 0,
        "top_k": 5.0,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical_p": 0.9,
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "mirostat": 2,
        "mirostat_tau": 4,
        "mirostat_eta": 0.2,
        "seed": 42,
        "num_predict": 7,
        "stop": ["x"],
        "num_ctx": 128,
        "num_thread": 2,
    }
    generate(server, options=options)
    params = server.service.seen[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (0, 5, 0.5, 0.1, 0.9)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.2, 0.5, 0.25)
    assert (params.mirostat, params.mirostat_tau, params.mirostat_eta) == (2, 4, 0.2)
    assert (params.seed, params.max_tokens, params.stop) == (42, 7, ["x"])
    generate(server, options={"repeat_penalty": 1.5, "repeat_last_n": 0})
    assert server.service.seen[-1].params.repetition_penalty == 1.0


def test_num_ctx_bounds_prompt_and_answer(server: Running) -> None:
    generate(server, options={"num_ctx": 64})
    assert (server.service.seen[-1].window, server.service.seen[-1].truncate_prompt_tokens) == (64, 63)
    generate(server, options={"num_ctx": 1}, truncate=False)
    assert (server.service.seen[-1].window, server.service.seen[-1].truncate_prompt_tokens) == (4, None)
    generate(server, options={"num_ctx": 0})
    assert server.service.seen[-1].window == 512, "the context of the model"


def test_the_oldest_turns_of_a_chat_that_does_not_fit_are_left_out(server: Running) -> None:
    old = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 300}]
    new = [{"role": "user", "content": "And now?"}]
    system = [{"role": "system", "content": "Be brief."}]
    assert chat(server, messages=[*system, *old, *new]).status_code == 200
    assert server.service.seen[-1].messages == [*system, *new]
    chat(server, messages=[*system, *new, *old, *new], options={"num_ctx": 100})
    assert server.service.seen[-1].messages == [*system, *new]
    reply = chat(server, messages=[*system, *old, *new], truncate=False)
    assert reply.status_code == 400 and "the prompt has" in reply.json()["error"]


def test_unknown_options_are_passed_over_with_a_warning(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "quire.server"):
        assert generate(server, options={"tfs_z": 1}, no_such_field=2).status_code == 200
        assert "invalid option provided: tfs_z" in caplog.text
        generate(server, options={"num_ctx": 100_000})
        assert "num_ctx is 100000" in caplog.text


def test_format_is_the_language_of_the_answer(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(server, format="json")
    assert server.service.seen[-1].params.structured.kind == "json"
    chat(server, format=schema)
    structured = server.service.seen[-1].params.structured
    assert structured.kind == "json_schema" and json.loads(structured.text) == schema


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"options": {"top_k": "many"}}, 400, 'option "top_k" must be of type integer'),
        ({"options": {"stop": "x"}}, 400, 'option "stop" must be of type array'),
        ({"options": {"repeat_last_n": 64}}, 400, "repeat_last_n"),
        ({"options": {"temperature": -1}}, 400, "temperature"),
        ({"options": {"temperature": 10**400}}, 400, "temperature"),
        ({"options": {"top_k": 2**63}}, 400, "top_k"),
        ({"options": {"mirostat": 3}}, 400, "mirostat"),
        ({"options": {"top_k": 1e308}}, 400, "top_k"),
        ({"options": {"num_predict": 1e308}}, 400, "max_tokens"),
        ({"options": {"seed": 1e308}}, 400, "seed"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"images": ["aGk="]}, 400, "images"),
        ({"template": "{{ .Prompt }}"}, 400, "template"),
        ({"format": "yaml"}, 400, "invalid format"),
        ({"model": "nobody"}, 404, "model `nobody` not found"),
        ({"prompt": "!full"}, 503, "8 requests wait"),
        ({"prompt": "!down"}, 503, "restarting"),
    ],
)
def test_mistakes_are_told_in_one_field(server: Running, body: dict[str, Any], status: int, said: str) -> None:
    reply = generate(server, **body)
    assert reply.status_code == status and list(reply.json()) == ["error"]
    assert said in reply.json()["error"]


CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def test_calls_and_thoughts_are_told_apart_from_the_text() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = CHATML + "{# <think> </think> #}"
    context = Context(FakeService().info, tokenizer, model="fake")
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": "fake", "messages": messages, "tools": [WEATHER], "think": True}).encode()
    text = "<think>hm</think>Looking." + CALLS
    whole, streamed = parse_chat(body, context), parse_chat(body, context)
    whole.begin([[1]])
    message = whole.full([Completion([1], [CompletionSample(text, [1], None, "stop")])]).message
    assert (message.thinking, message.content) == ("hm", "Looking.")
    [call] = message.tool_calls
    assert call["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    streamed.begin([[1]])
    chunks = [chunk for letter in text for chunk in streamed.chunks(0, TextEvent(0, letter, [1]))]
    chunks += streamed.chunks(0, TextEvent(0, "", [1], finish_reason="stop"))
    assert "".join(chunk.message.content for chunk in chunks) == "Looking."
    assert "".join(chunk.message.thinking or "" for chunk in chunks) == "hm"
    assert [len(chunk.message.tool_calls or ()) for chunk in chunks if chunk.message.tool_calls] == [1]


def test_thinking_and_tools_that_cannot_be(server: Running) -> None:
    assert "does not support thinking" in chat(server, think=True).json()["error"]
    assert chat(server, think=False).status_code == 200
    assert chat(server, tools=[{"type": "function"}]).status_code == 400


def test_an_error_in_a_stream_is_its_last_line(server: Running) -> None:
    *_, last = lines(generate(server, prompt="!fail"))
    assert last == {"error": "the engine failed on purpose"}


def test_a_body_may_come_as_curl_sends_it(server: Running) -> None:
    reply = server.http.post(
        "/api/generate",
        content=b'{"model": "fake:latest", "prompt": "Hello", "stream": false}',
        headers={"content-type": "application/x-www-form-urlencoded"},
    )
    assert reply.json()["model"] == "fake:latest", "the tag `latest` is no other model"


def test_what_is_told_of_models(server: Running) -> None:
    [model] = server.http.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "fake"
    [model] = server.http.get("/api/ps").json()["models"]
    assert model["context_length"] == 512
    shown = server.http.post("/api/show", json={"model": "fake"}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["quire.context_length"] == 512 and "<|im_start|>" in shown["template"]
    assert server.http.post("/api/show", json={}).json()["error"] == "model is required"
    assert server.http.get("/api/version").json()["version"]


def test_what_ollama_has_and_this_has_not_is_refused_in_its_words(server: Running) -> None:
    with ollama.Client(f"http://127.0.0.1:{server.port}") as client:
        for change in (
            lambda: client.delete("fake"),
            lambda: client.copy("fake", "other"),
            lambda: client.create("other", from_="fake"),
            lambda: client.push("fake"),
        ):
            with pytest.raises(ollama.ResponseError, match="cannot be changed by request") as caught:
                change()
            assert caught.value.status_code == 403
        with pytest.raises(ollama.ResponseError, match="does not support insert"):
            client.generate("fake", "x", suffix="y")


def test_its_client_embeds(server: Running) -> None:
    with ollama.Client(f"http://127.0.0.1:{server.port}") as client:
        found = client.embed("fake:latest", ["ab", "abcd"], dimensions=2)
        assert found.embeddings == [[3.0, 1.0], [5.0, 1.0]] and found.prompt_eval_count == 8
        assert client.embed("fake", "ab").embeddings == [client.embeddings("fake", "ab").embedding]
        assert client.embed("fake", []).embeddings == []
        with pytest.raises(ollama.ResponseError, match="nobody"):
            client.embed("nobody", "ab")
