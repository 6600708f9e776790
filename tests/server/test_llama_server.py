"""The dialect of llama-server, with a service whose answers are known."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.core.request import DraftUsage
from server.fake_service import ByteTokenizer, answer
from server.running import Running, running

ANSWER = answer(0, 6)  # to <s> and five letters


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def ask(server: Running, path: str = "/completion", **body: Any) -> httpx.Response:
    return server.http.post(path, json={"prompt": "Hello", **body})


def test_a_whole_completion(server: Running) -> None:
    told = ask(server, return_tokens=True).json()
    assert (told["content"], told["stop"], told["stop_type"], told["model"]) == (ANSWER, True, "eos", "fake")
    assert told["tokens_evaluated"] == 6 and told["tokens_predicted"] == len(told["tokens"]) == len(ANSWER.encode()) + 1
    assert told["timings"]["predicted_n"] == told["tokens_predicted"] and told["timings"]["cache_n"] == 4
    assert told["generation_settings"]["top_k"] == 40 and told["prompt"] == "<s>Hello"
    assert ask(server, n_predict=3).json()["stop_type"] == "limit"
    stopped = ask(server, stop=["read"]).json()
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("Sample 0 ", "word", "read")
    several = ask(server, prompt=["a", "bc"]).json()
    assert [each["tokens_evaluated"] for each in several] == [2, 3] and ask(server, prompt=[72, 105]).json()["stop"]


def test_a_stream_has_no_done_and_ends_with_the_facts(server: Running) -> None:
    reply = ask(server, stream=True, n_predict=8)
    told = [json.loads(line[6:]) for line in reply.text.splitlines() if line]
    assert "".join(each["content"] for each in told) == ANSWER[:8]
    assert [each["stop"] for each in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["timings"]["predicted_n"] == 8 and "timings" not in told[0]


def test_timings_tell_what_was_accepted(server: Running) -> None:
    body = {"prompt": "Hello", "n_predict": 3}
    assert "draft_n" not in server.http.post("/completion", json=body).json()["timings"]
    server.service.drafts = DraftUsage(5, [1, 0, 1])
    timings = server.http.post("/completion", json=body).json()["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (5, 2)


def test_its_defaults_and_fields_reach_the_sampler(server: Running) -> None:
    ask(server)
    params = server.service.seen[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert params.max_tokens is None and params.seed is None
    fields = {"temperature": -1, "seed": 3, "repeat_penalty": 1.2, "logit_bias": [[15, -0.5], ["ab", False]]}
    ask(server, **fields, json_schema={"type": "object"}, cache_prompt=True, id_slot=-1, samplers=["top_k"])
    params = server.service.seen[-1].params
    assert (params.temperature, params.seed, params.repetition_penalty) == (0.0, 3, 1.2)
    assert params.logit_bias == {15: -0.5, 97: -100.0, 98: -100.0} and params.structured.kind == "json_schema"
    ask(server, grammar='root ::= "a"', logit_bias={"9": 2})
    assert server.service.seen[-1].params.structured.kind == "grammar"
    probed = ask(server, n_probs=2, n_predict=1).json()["completion_probabilities"]
    assert probed[0]["token"] == "S" and len(probed[0]["top_logprobs"]) == 2


def test_a_gap_is_filled_in(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    gap = {"input_prefix": "def f(", "input_suffix": "return x"}
    refused = server.http.post("/infill", json=gap)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    names = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<s>": 256}
    monkeypatch.setattr(ByteTokenizer, "id_of", lambda self, token: names.get(token))
    extra = [{"filename": "a.py", "text": "x = 1"}]
    assert server.http.post("/infill", json={**gap, "input_extra": extra, "prompt": "a"}).json()["stop"]
    asked = server.service.seen[-1]
    assert bytes(asked.prompt_ids[1:]) == b"\x01x = 1\ndef f(\x02return x\x03a" and 1 in asked.params.stop_token_ids


def test_texts_and_tokens(server: Running) -> None:
    def post(path: str, **body: Any) -> Any:
        return server.http.post(path, json=body).json()

    assert post("/tokenize", content="hé") == {"tokens": [104, 195, 169]}
    assert post("/tokenize", content="h", add_special=True) == {"tokens": [256, 104]}
    pieces = [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert post("/tokenize", content="hé", with_pieces=True) == {"tokens": pieces}
    assert post("/detokenize", tokens=[104, 105])["content"] == "hi"
    rendered = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert post("/apply-template", messages=[{"role": "user", "content": "Hello"}]) == {"prompt": rendered}
    assert post("/embedding", content=["ab", "c"])[0] == {"index": 0, "embedding": [[3.0, 1.0, 0.5, 0.25]]}


def test_what_it_tells_of_itself(server: Running) -> None:
    props = server.http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512 and "im_start" in props["chat_template"]
    assert props["model_alias"] == "fake" and props["modalities"] == {"vision": False, "audio": False}
    assert server.http.get("/v1/health").status_code == 200
    described = server.http.get("/openapi.json").json()["paths"]
    assert {"/completion", "/infill", "/apply-template", "/embedding", "/props", "/tokenize"} <= described.keys()
    assert server.http.get("/models").json() == server.http.get("/v1/models").json()
    asked = {"messages": [{"role": "user", "content": "Hello"}]}
    assert server.http.post("/chat/completions", json=asked).json()["object"] == "chat.completion"
    ranked = server.http.post("/reranking", json={"query": "ab", "documents": ["a", "ab"]}).json()
    assert [each["index"] for each in ranked["results"]] == [1, 0]


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("GET", "/slots", "GET /live shows what runs"),
        ("POST", "/slots/0?action=save", "no action `save` (every prefix is kept.*--kv-disk-path"),
        ("POST", "/slots/3?action=restore", "no action `restore` .*--kv-disk-path"),
        ("POST", "/slots/0?action=erase", "POST /reset_prefix_cache"),
        ("POST", "/slots/0", "--kv-disk-path"),
    ],
)
def test_slots_say_what_keeps_prefixes_here(server: Running, method: str, path: str, told: str) -> None:
    reply = server.http.request(method, path, json={"filename": "a.bin"} if method == "POST" else None)
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    assert re.search(told.replace("(", r"\("), reply.json()["error"]["message"])


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"prompt": []}, 400, "invalid_request_error"),
        ({"prompt": "x" * 600}, 400, "exceed_context_size_error"),
        ({"n_probs": 99}, 400, "invalid_request_error"),
        ({"grammar": "root ::= x", "json_schema": {}}, 400, "invalid_request_error"),
        ({"model": "nobody"}, 404, "not_found_error"),
        ({"prompt": "!full"}, 429, "unavailable_error"),
        ({"prompt": "!fail"}, 500, "server_error"),
    ],
)
def test_its_errors_have_its_shape(server: Running, body: dict[str, Any], status: int, kind: str) -> None:
    reply = ask(server, **body)
    assert reply.status_code == status and reply.json()["error"].keys() == {"code", "message", "type"}
    assert (reply.json()["error"]["code"], reply.json()["error"]["type"]) == (status, kind)
