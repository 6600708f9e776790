"""Everything that multiplies has a bound, and a message about it is short."""

import json
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import BadRequest, UnknownModel
from quire.server.dialects.anthropic.messages import AnthropicInputMessage, plain_messages
from quire.server.dialects.token_spans import token_spans
from quire.server.http.json_size import MAX_MEMBERS, MAX_VALUES, SCAN_BYTES, check_json_size
from quire.server.http.listen import open_listener
from quire.server.http.tcp_socket import CannotListen
from quire.server.options import ServerOptions
from server.fake_service import ByteTokenizer
from server.running import Running, running


def message(answer: Any) -> str:
    return answer.json()["error"]["message"]


# -- the number of JSON values


def test_marks_in_texts_are_no_values() -> None:
    text = json.dumps({"prompt": ',:{["\\' * 100_000, "a": '\\"' * SCAN_BYTES}).encode()
    check_json_size(text)
    for shift in range(4):  # an escape lies across the end of what one call scans
        check_json_size(b'"' + b"x" * shift + b'\\"' * SCAN_BYTES + b'"' + b"," * 10)


@pytest.mark.parametrize(
    ("mark", "limit", "what"),
    [
        (b",", MAX_VALUES, "values"),
        (b":", MAX_MEMBERS, "members of objects"),
        (b"[", MAX_MEMBERS, "arrays"),
        (b"{", MAX_MEMBERS, "objects"),
    ],
)
def test_a_body_has_a_limited_number_of_values(mark: bytes, limit: int, what: str) -> None:
    check_json_size(b'{"a,b":' + mark * (limit - 1))
    with pytest.raises(BadRequest, match=f"more than {limit} {what}"):
        check_json_size(b'{"a,b":' + mark * (limit + 1))


def test_many_empty_lists_are_refused_before_they_are_decoded(server: Running) -> None:
    body = b'{"messages":[{"role":"user","content":"x","annotations":[' + b"[]," * 100_000 + b"[]]}]}"
    answer = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "more than 65536 arrays" in message(answer)


# -- products and lists


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"stop_token_ids": [5] * 4097}, "stop_token_ids has 4097 elements, and 4096 are allowed"),
        ({"logit_bias": {str(n): 1 for n in range(4097)}}, "logit_bias has 4097 elements"),
        ({"bad_words": ["x"] * 257}, "bad_words has 257 elements, and 256 are allowed"),
        ({"bad_words": ["x" * 257]}, "bad_words has a text of 257 characters"),
        ({"stop": ["x" * 1025]}, "stop has a text of 1025 characters"),
        ({"prompt": ["x"] * 17, "n": 128}, "17 prompts ask for 2176 completions, and 2048 are allowed"),
        ({"prompt": ["x"] * 300, "stop_token_ids": [5] * 4096}, "300 prompts have 1228800 ids, and 1048576"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
    ],
)
def test_lists_and_products_of_fields_have_bounds(server: Running, body: dict[str, Any], problem: str) -> None:
    answer = server.complete(**body)
    assert answer.status_code == 400 and problem in message(answer)


def test_prompts_that_the_engine_never_takes_together_are_refused_at_once(server: Running) -> None:
    server.service.info.max_requests = 100
    try:
        answer = server.complete(prompt=["x"] * 101)
    finally:
        server.service.info.max_requests = 2048
    assert answer.status_code == 400 and "101 prompts, and the server takes 100" in message(answer)


def test_an_answer_repeats_its_prompts_only_so_often(server: Running) -> None:
    asked = {"prompt": ["x" * 4000] * 3, "n": 90, "echo": True, "max_tokens": 1}
    answer = server.complete(**asked)
    assert answer.status_code == 400 and "1080270 tokens of the answer" in message(answer)
    assert not server.service.open, "none of its prompts goes on"


def test_an_answer_holds_only_so_many_logprobs(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.dialects.generate.MAX_LOGPROBS_OF_ANSWER", 1000)
    fits = server.complete(prompt="x" * 900, prompt_logprobs=0, max_tokens=1)
    assert fits.status_code == 200
    answer = server.complete(prompt="x" * 90, prompt_logprobs=10, n=2, max_tokens=1)
    assert answer.status_code == 400 and "more than 1000 logprobs" in message(answer)
    assert not server.service.open


def test_a_long_answer_is_written_in_a_thread_and_stored(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.server.dialects.generate.INLINE_LOGPROBS", 0)
    asked = {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    first = server.http.post("/v1/responses", json=asked).json()
    assert len(first["output"][0]["content"][0]["logprobs"]) > 10
    assert server.http.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
    again = {"input": "Go on", "previous_response_id": first["id"]}
    assert server.http.post("/v1/responses", json=again).status_code == 200


def test_many_completions_count_as_many_requests_of_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": "a", "key": "k", "max_concurrency": 4}]}))
    with running(ServerOptions(keys_file=str(keys))) as server:
        server.http.headers["authorization"] = "Bearer k"
        assert server.complete(prompt=["x", "y"], n=2).status_code == 200
        for asked in ({"prompt": ["x"] * 5}, {"prompt": "x", "n": 5}, {"prompt": ["x", "y"], "n": 3}):
            answer = server.complete(**asked)
            assert answer.status_code == 400 and "key `a` may have 4 in flight" in message(answer)
        with server.http.stream("POST", "/v1/completions", json={"prompt": "!hang", "n": 3, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert server.complete(prompt="x").status_code == 200
            answer = server.complete(prompt=["x", "y"])
            assert answer.status_code == 429 and "has 4 requests in flight" in message(answer)


# -- names and numbers of any length


def test_a_name_of_megabytes_makes_a_short_message(server: Running) -> None:
    for body in ({"model": "m" * (2 << 20)}, {"promp" * (1 << 20): 1}, {" - at `$" * 100_000: 1}):
        answer = server.complete(**body)
        assert answer.status_code in (400, 404) and len(answer.content) < 4000
    answer = server.http.get("/v1/models/" + "m" * 60_000)
    assert answer.status_code == 404 and len(answer.content) < 4000
    assert len(UnknownModel("m" * 5000).message) == 999


def test_a_limit_of_many_digits_is_no_failure(server: Running) -> None:
    name = server.http.post("/v1/responses", json={"input": "Hi"}).json()["id"]
    for limit in ("1" * 5000, "101", "0", "-1", "\u0661"):
        answer = server.http.get(f"/v1/responses/{name}/input_items", params={"limit": limit})
        assert answer.status_code == 400 and "give 1 to 100" in message(answer)


@pytest.mark.parametrize("name", ["messages", "self", "tokenizer", "context", "request", "budget"])
def test_variables_of_a_template_may_have_any_name(server: Running, name: str) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {name: 1}}
        answer = server.http.post(path, json=body)
        assert answer.status_code == (400 if name == "messages" else 200), answer.text


def test_a_text_to_tokenize_has_a_bound(server: Running) -> None:
    for field in ("prompt", "inputs"):
        answer = server.http.post("/tokenize", json={field: "x" * ((1 << 20) + 1)})
        assert answer.status_code == 400 and "1048577 characters, and 1048576 are allowed" in message(answer)


def test_neighbouring_messages_are_joined_in_linear_time() -> None:
    def seconds(count: int) -> float:
        messages = [AnthropicInputMessage(role="user", content="x" * 100)] * count
        begin = time.thread_time()
        [whole] = plain_messages(None, messages)
        assert len(whole["content"]) == 101 * count - 1
        return time.thread_time() - begin

    assert min(seconds(20_000) for _ in range(3)) < 40 * max(seconds(2_000) for _ in range(3)), "not ten times as much"


def test_spans_of_tokens_that_are_parts_of_characters() -> None:
    spans = token_spans(ByteTokenizer(), [*"aé€".encode()], "aé€")  # type: ignore[arg-type]
    assert [(span.text, span.start, span.stop) for span in spans] == [
        ("a", 0, 1), ("é", 1, 2), ("é", 1, 2), ("€", 2, 3), ("€", 2, 3), ("€", 2, 3)
    ]  # fmt: skip


# -- web pages from elsewhere


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
def test_a_page_from_elsewhere_cannot_send_what_a_browser_does_not_ask_about(
    path: str, headers: dict[str, str]
) -> None:
    body = b'{"model": "fake", "prompt": "x", "max_tokens": 1, "stream": false}'
    with running(ServerOptions(allowed_origins=["https://app.example"])) as server:

        def post(**more: str) -> int:
            return server.http.post(path, content=body, headers={**headers, **more}).status_code

        for origin in ("https://evil.example", "null", f"http://127.0.0.1:{server.port + 1}"):
            assert post(origin=origin) == 403
        rebound = f"evil.example:{server.port}"
        assert post(origin=f"http://{rebound}", host=rebound) == 403
        fine = 415 if headers and path.startswith("/v1") else 200
        for own in ({}, {"origin": "https://app.example"}, {"origin": f"http://127.0.0.1:{server.port}"}):
            assert post(**own) == fine
        assert not server.service.open


# -- the unix socket


def test_a_unix_socket_is_for_its_user_and_gone_afterwards(tmp_path: Path) -> None:
    options = ServerOptions(uds=str(tmp_path / "quire.sock"))
    path = Path(options.uds or "")
    listener = open_listener(options)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listener.bound.listen()
    with pytest.raises(CannotListen, match="another server listens on it"):
        open_listener(options)
    listener.close()
    assert not path.exists()

    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    listener = open_listener(options)  # what a dead server left is replaced
    path.unlink()
    path.write_text("another's")
    listener.close()
    assert path.read_text() == "another's"
    with pytest.raises(CannotListen, match="this file is no socket"):
        open_listener(options)


def test_odd_values_of_ollama_take_no_time(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    asked = {"model": "fake", "prompt": "x", "stream": False, "options": {"num_predict": 1}}
    assert server.http.post("/api/generate", json={**asked, "keep_alive": "0" * 3_000_000 + "x"}).status_code == 200
    answer = server.http.post("/api/generate", json={**asked, "format": [1] * 500_000})
    assert answer.status_code == 400 and answer.json() == {
        "error": 'invalid format: a list (send "json" or a JSON schema)'
    }
    unknown = {f"option{number}": 1 for number in range(50_000)}
    assert server.http.post("/api/generate", json={**asked, "options": unknown}).status_code == 200
    assert len(caplog.text) < 2000, "one line for all of them"
