"""The server as anything but a well-behaved client meets it."""

import json
from collections.abc import Iterator

import httpx
import pytest

from quire import __version__
from quire.server.options import ServerOptions
from server.running import Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def check_error(response: httpx.Response, status: int) -> dict[str, str]:
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("chat_template", "{{ messages }}"),
        ("vllm_xargs", {"a": 1}),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("moderation", {"model": "x"}),
    ],
)
def test_unsupported_fields_are_refused_by_name(server: Running, field: str, value: object) -> None:
    assert check_error(server.chat(**{field: value}), 400)["param"] == field


def test_a_suffix_is_refused(server: Running) -> None:
    assert check_error(server.complete(suffix="x"), 400)["param"] == "suffix"


def test_values_that_ask_for_nothing_are_taken(server: Running) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "web_search_options": {},
        "session_id": "s",
        "request_id": "r",
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "temperature": None,
        "stop": None,
        "logit_bias": None,
        "max_tokens": None,
        "stream": False,
        "stream_options": None,
    }
    assert server.chat(**harmless).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_token": 3}, "max_token", "did you mean `max_tokens`?"),
        ({"max_tokens": "3"}, "max_tokens", "expected `int | null`, got `str`"),
        ({"max_tokens": 10**30}, "max_tokens", "expected `int` <= 2147483647"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "expected `int`"),
        ({"stop": [""]}, "stop", "a stop string is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": ["a", 1]}, "prompt", "mixes"),
        ({"prompt": [[1, "x"]]}, "prompt[0][1]", "expected `int`"),
        ({"prompt": [999]}, "prompt", "999"),
        ({"prompt": ["a"] * 2049}, "prompt", "prompt has 2049 texts, and 2048 are allowed"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown field"),
        ({"stream": True, "n": 1, "best_of": 2}, "best_of", "cannot be streamed"),
        ({"stream": True, "use_beam_search": True}, "use_beam_search", "cannot be streamed"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "cannot be streamed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "0"),
        ({"best_of": 1, "n": 2}, "best_of", "best_of is 1 and n is 2"),
    ],
)
def test_a_wrong_field_is_named(server: Running, body: dict[str, object], param: str, words: str) -> None:
    found = check_error(server.complete(**body), 400)
    assert found["param"] == param and words in found["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
    ],
)
def test_a_wrong_message_is_named(server: Running, messages: object, param: str) -> None:
    assert check_error(server.http.post("/v1/chat/completions", json={"messages": messages}), 400)["param"] == param


def test_logprobs_have_to_be_asked_for_together(server: Running) -> None:
    assert check_error(server.chat(top_logprobs=2), 400)["param"] == "top_logprobs"
    assert check_error(server.chat(max_tokens=2, max_completion_tokens=3), 400)["param"] == "max_tokens"
    assert server.chat(max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "n": NaN}',
        b'{"prompt": ' + b"[" * 200_000,
        b'{"metadata": ' + b'{"a":' * 100_000,
        b'{"prompt": "x"} trailing',
    ],
)
def test_what_is_not_json_is_a_bad_request(server: Running, body: bytes) -> None:
    json_type = {"content-type": "application/json"}
    check_error(server.http.post("/v1/completions", content=body, headers=json_type), 400)


def test_other_media_types_are_refused(server: Running) -> None:
    response = server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert check_error(response, 415)["code"] == "unsupported_media_type"
    charset = {"content-type": "application/json; charset=utf-8"}
    assert server.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=charset).status_code == 200


def test_paths_and_methods(server: Running) -> None:
    assert check_error(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    response = server.http.get("/v1/completions")
    assert check_error(response, 405)["code"] == "method_not_allowed" and "POST" in response.headers["allow"]


def test_a_body_over_the_limit_is_413_declared_or_not() -> None:
    with running(ServerOptions(max_body_bytes=1000)) as server:
        body = json.dumps({"prompt": "x" * 2000}).encode()
        json_type = {"content-type": "application/json"}
        assert (
            check_error(server.http.post("/v1/completions", content=body, headers=json_type), 413)["code"]
            == "request_too_large"
        )

        def chunked() -> Iterator[bytes]:
            for at in range(0, len(body), 100):
                yield body[at : at + 100]

        check_error(server.http.post("/v1/completions", content=chunked(), headers=json_type), 413)
        assert server.complete().status_code == 200


def test_a_bug_is_500_with_an_id_and_without_its_message(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    response = server.http.post("/v1/completions", json={"prompt": "!crash"}, headers={"x-request-id": "id-7"})
    found = check_error(response, 500)
    assert "secret" not in response.text and "Traceback" not in response.text
    assert "id-7" in found["message"] and response.headers["x-request-id"] == "id-7"
    assert "id-7" in caplog.text and "secret" in caplog.text


def test_every_answer_has_a_request_id(server: Running) -> None:
    ids = {server.complete().headers["x-request-id"], server.http.get("/nothing").headers["x-request-id"]}
    assert len(ids) == 2 and all(ids)
    odd = server.http.get("/health", headers={"x-request-id": "x" * 500})
    assert odd.headers["x-request-id"] != "x" * 500


def test_a_stream_on_the_wire(server: Running) -> None:
    response = server.complete(stream=True, max_tokens=2)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done, end = response.text.split("\n\n")
    assert done == "data: [DONE]" and end == ""
    assert [json.loads(chunk.removeprefix("data: "))["choices"][0]["text"] for chunk in chunks] == ["S", "a"]
    usage = server.complete(stream=True, max_tokens=2, stream_options={"continuous_usage_stats": True}).text
    first = json.loads(usage.split("\n\n")[0].removeprefix("data: "))
    assert first["usage"]["completion_tokens"] == 1


def test_a_stream_that_fails_ends_with_the_error(server: Running) -> None:
    *_, last, end = server.complete(prompt="!fail", stream=True).text.split("\n\n")
    assert end == "" and json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_health_is_not_readiness(server: Running) -> None:
    def statuses() -> tuple[int, int]:
        return server.http.get("/health").status_code, server.http.get("/ready").status_code

    try:
        assert statuses() == (200, 200)
        server.service.state = "restarting"
        assert statuses() == (200, 503)
        assert check_error(server.complete(), 503)["code"] == "unavailable"
        server.service.state = "stopped"
        assert statuses() == (503, 503)
    finally:
        server.service.state = "ready"


def test_version(server: Running) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


def test_keys() -> None:
    with running(ServerOptions(api_key=["one", "two"])) as server:
        assert check_error(server.complete(), 401)["type"] == "authentication_error"
        server.http.headers["authorization"] = "Bearer three"
        response = server.complete()
        assert (
            check_error(response, 401)["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
        )
        assert check_error(server.http.get("/v1/models"), 401)
        for path in ("/health", "/ready", "/metrics"):
            assert server.http.get(path).status_code == 200
        tenants = []
        for key in ("one", "two"):
            server.http.headers["authorization"] = f"Bearer {key}"
            assert server.complete().status_code == 200
            tenants.append(server.service.seen[-1].tenant)
        assert len(set(tenants)) == 2 and not {"one", "two"} & set(tenants)


def test_a_key_may_be_any_text_and_probes_need_none_behind_a_proxy() -> None:
    with running(ServerOptions(api_key=["clé"], root_path="/models")) as server:
        assert server.http.get("/ready").status_code == 200
        assert server.http.get("/v1/models").status_code == 401
        key = {"authorization": "Bearer clé".encode()}
        assert server.http.get("/v1/models", headers=key).status_code == 200


def test_browsers_may_ask_from_anywhere_unless_told(server: Running) -> None:
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert server.http.options("/v1/completions", headers=asked).headers["access-control-allow-origin"] == "*"
    with running(ServerOptions(allowed_origins=["https://b.example"])) as strict:
        assert strict.http.options("/v1/completions", headers=asked).status_code == 400


def test_tokenize_and_back(server: Running) -> None:
    found = server.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert found["tokens"] == [256, *"hé".encode()] and found["count"] == 4 and found["max_model_len"] == 512
    assert found["token_strs"][:2] == ["<s>", "h"]
    bare = server.http.post("/tokenize", json={"prompt": "x", "add_special_tokens": False}).json()
    assert bare["tokens"] == [120] and bare["token_strs"] is None
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]) == b"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert server.http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == "<s>hé"
    assert check_error(server.http.post("/detokenize", json={"tokens": [999]}), 400)["param"] == "tokens"
    assert check_error(server.http.post("/tokenize", json={}), 400)["param"] == "prompt"
    assert check_error(server.http.post("/tokenize", json={"prompt": "x", "model": "no"}), 404)["param"] == "model"


def test_sagemakers_names_of_things(server: Running) -> None:
    assert server.http.get("/ping").status_code == 200
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    chat = server.http.post("/invocations", json=asked).json()
    assert chat["choices"][0]["message"] == server.chat(max_tokens=3).json()["choices"][0]["message"]
    told = server.http.post("/invocations", json={"prompt": "Hello", "max_tokens": 3}).json()
    assert told["choices"][0]["text"] == server.complete(max_tokens=3).json()["choices"][0]["text"]
    assert server.http.post("/invocations", json={"inputs": "Hello"}).json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/completions", "/v1/completions"),
        ("/responses", "/v1/responses"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/version", "/version"),
    ],
)
def test_a_path_that_is_nearly_right_is_told_the_right_one(server: Running, path: str, meant: str) -> None:
    """Clients add `/v1` to an address that has it already, or leave it out."""
    error = check_error(server.http.post(path, json={}), 404)
    assert error["message"].endswith(f"(did you mean {meant}?)")


def test_a_wrong_method_is_told_the_right_one(server: Running) -> None:
    assert "it takes POST" in check_error(server.http.get("/v1/completions"), 405)["message"]
