"""The dialect of Anthropic, on a socket and by itself, with a service whose answers are known."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from quire.server.dialects.anthropic.call import parse_messages
from quire.server.dialects.anthropic.shapes import sse
from quire.server.dialects.completion import Completion, CompletionSample
from quire.server.dialects.dialect import Context
from quire.text.event import TextEvent
from server.fake_service import CHATML, ByteTokenizer, FakeService, answer
from server.running import Running, running

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
SHOWN = {"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}
HELLO = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
ANSWER = answer(0, len(HELLO))
WEATHER = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def ask(server: Running, content: Any = "Hello", path: str = "/v1/messages", **body: Any) -> httpx.Response:
    given = {"model": "fake", "max_tokens": 100, "messages": [{"role": "user", "content": content}], **body}
    return server.http.post(path, json={name: value for name, value in given.items() if value is not None})


def events(data: bytes) -> list[dict[str, Any]]:
    told = []
    for part in data.decode().split("\n\n"):
        if part:
            name, body = part.split("\n")
            told.append(json.loads(body.removeprefix("data: ")))
            assert name == f"event: {told[-1]['type']}"
    return told


def test_a_whole_message(server: Running) -> None:
    message = ask(server).json()
    assert message["content"] == [{"type": "text", "text": ANSWER}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"] == {
        "input_tokens": len(HELLO) - 4,
        "output_tokens": len(ANSWER.encode()) + 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
    }


def test_a_stream_is_made_of_blocks(server: Running) -> None:
    response = ask(server, stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    told = events(response.content)
    kinds = [event["type"] for event in told]
    assert kinds[:4] == ["message_start", "content_block_start", "ping", "content_block_delta"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert told[0]["message"]["content"] == [] and told[0]["message"]["usage"]["input_tokens"] == len(HELLO) - 4
    texts = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(texts) == ANSWER
    assert told[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == len(ANSWER.encode()) + 1


def test_why_it_ended(server: Running) -> None:
    assert ask(server, max_tokens=3).json()["stop_reason"] == "max_tokens"
    stopped = ask(server, stop_sequences=["tokens", "never"]).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "tokens")
    assert stopped["content"][0]["text"] == ANSWER.partition("tokens")[0]


def test_an_answer_ends_where_the_context_does(server: Running) -> None:
    """Claude Code asks for 32000 tokens, whatever the model is."""
    server.service.says = "x" * 600
    try:
        told = ask(server, max_tokens=32000).json()
        assert told["stop_reason"] == "model_context_window_exceeded"
        assert told["usage"]["output_tokens"] == 512 - len(HELLO)
        streamed = events(ask(server, max_tokens=32000, stream=True).content)
        assert streamed[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"
        assert ask(server, max_tokens=9).json()["stop_reason"] == "max_tokens"
    finally:
        server.service.says = None


def test_messages_become_what_templates_read(server: Running) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    ask(server, messages=messages, system=[{"type": "text", "text": "s"}])
    request = server.service.seen[-1]
    assert request.messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ]
    assert request.template_options["continue_final_message"] is True, "the assistant's last words are gone on with"


def test_params_and_the_language_of_an_answer(server: Running) -> None:
    schema = {"type": "object", "properties": {}}
    ask(
        server, temperature=0.5, top_k=3, top_p=0.9, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    params = server.service.seen[-1].params
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.5, 3, 0.9, 100)
    assert params.structured is not None and json.loads(params.structured.text) == schema


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"nobody_knows": 1}, "nobody_knows: Extra inputs are not permitted"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name: Extra inputs"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0.type: `image` is not supported"),
        ({"messages": [{"role": "user", "content": [SHOWN]}]}, "messages.0.content.0.content.0.type: `image` is not"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages.0: all messages must have non-empty content"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages.0.role"),
        ({"messages": []}, "messages"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "deep"}}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "files"}]}, "mcp_toolset"),
        ({"tools": [{"description": "It has no name."}]}, "tools.0.name: Field required"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]}, "whitespace"),
    ],
)
def test_mistakes_are_named(server: Running, body: dict[str, Any], said: str) -> None:
    reply = ask(server, **body)
    assert reply.status_code == 400, reply.text
    told = reply.json()
    assert told["type"] == "error" and told["error"]["type"] == "invalid_request_error"
    assert said in told["error"]["message"]


def test_its_client_does_without_threads_when_it_is_told_so(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.info, "max_model_len", 4096)

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: its name
        """
        return f"rain in {city}"

    said = iter(['<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', "It rains."])
    hello: Any = [{"role": "user", "content": "Hello"}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(model="fake", max_tokens=300, tools=[weather], messages=hello)
        server.service.says = next(said)
        answers = []
        for message in runner:
            answers.append(message.content[0])
            server.service.says = next(said, None)
        assert [answer.type for answer in answers] == ["tool_use", "text"] and answers[1].text == "It rains."
        assert "rain in Rome" in str(server.service.seen[-1].messages), "the whole conversation was sent"
        server.service.says = None
        [model] = client.models.list()
        assert (model.id, model.display_name, model.type) == ("fake", "fake", "model")
        with pytest.raises(anthropic.NotFoundError, match="/v1/messages/batches") as caught:
            client.messages.batches.list()
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_other_failures_have_its_types(server: Running) -> None:
    for content, status, kind in (
        ("!full", 529, "overloaded_error"),
        ("!down", 529, "overloaded_error"),
        ("!fail", 500, "api_error"),
        ("x" * 600, 400, "invalid_request_error"),
    ):
        reply = ask(server, content)
        assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind), content
    reply = ask(server, model="nobody")
    assert (reply.status_code, reply.json()["error"]["type"]) == (404, "not_found_error")
    *_, last = events(ask(server, "!fail", stream=True).content)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "the engine failed on purpose"}}


def test_tokens_are_counted_without_generating(server: Running) -> None:
    before = len(server.service.seen)
    reply = ask(server, path="/v1/messages/count_tokens", max_tokens=None)
    assert reply.json() == {"input_tokens": len(HELLO)} and len(server.service.seen) == before
    more = ask(server, path="/v1/messages/count_tokens", max_tokens=None, tools=[WEATHER]).json()["input_tokens"]
    assert more > len(HELLO) + len(json.dumps(WEATHER["input_schema"]))
    assert ask(server, path="/v1/messages/count_tokens").status_code == 400, "it takes no max_tokens"


# -- tools and thoughts, without a socket -----------------------------------------------------------------------------


def say(text: str, template: str = CHATML, **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole message and the events for an answer, given letter by letter."""
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    given = {"model": "fake", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello"}], **body}
    context = Context(FakeService().info, tokenizer, model="fake")
    whole, streamed = (parse_messages(json.dumps(given).encode(), context) for _ in range(2))
    prompt = list(b"prompt")
    whole.begin([prompt])
    message = whole.full([Completion(prompt, [CompletionSample(text, [1] * len(text), None, "stop")])])
    streamed.begin([prompt])
    chunks = [chunk for letter in text for chunk in streamed.chunks(0, TextEvent(0, letter, [1]))]
    chunks += streamed.chunks(0, TextEvent(0, "", [1], finish_reason="stop"))
    return json.loads(sse(message).split(b"data: ")[1]), events(b"".join(map(sse, chunks)))


def blocks(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a client makes of the events."""
    made: list[dict[str, Any]] = []
    for event in told:
        if event["type"] == "content_block_start":
            assert event["index"] == len(made)
            made.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type")
            [(name, value)] = delta.items()
            made[event["index"]]["json" if kind == "input_json_delta" else name] += value
    for block in made:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return made


def without_ids(content: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in content]


CALLS = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def test_calls_are_blocks_and_their_arguments_are_streamed() -> None:
    message, told = say(CALLS, tools=[WEATHER])
    assert without_ids(message["content"]) == [
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}},
        {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert message["stop_reason"] == "tool_use"
    assert without_ids(blocks(told)) == without_ids(message["content"])
    pieces = [event for event in told if event.get("delta", {}).get("type") == "input_json_delta"]
    assert len(pieces) > 4, "piece by piece"
    assert told[-2]["delta"]["stop_reason"] == "tool_use"
    assert len({block["id"] for block in message["content"][1:]}) == 2


def test_one_call_at_most_where_the_client_says_so() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message, told = say(CALLS, tools=[WEATHER], tool_choice=choice)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert without_ids(blocks(told)) == without_ids(message["content"])


def test_a_call_that_was_cut_short_is_text() -> None:
    message, _ = say('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro', tools=[WEATHER])
    assert [block["type"] for block in message["content"]] == ["text"] and message["stop_reason"] == "end_turn"


def test_results_of_tools_are_shown_to_the_model(server: Running) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "X"}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    assert ask(server, messages=messages).status_code == 200
    shown = server.service.seen[-1].messages
    assert shown is not None and [message["role"] for message in shown] == ["user", "assistant", "user", "user"]
    assert '"X"' in shown[1]["content"] and "sunny" in shown[2]["content"] and shown[3]["content"] == "And?"


def test_thoughts_are_a_block_of_their_own() -> None:
    template = CHATML + "{# <think> </think> #}"
    message, told = say("<think>\nhm\n</think>\n\nYes.", template, thinking={"type": "enabled", "budget_tokens": 1024})
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "quire"},
        {"type": "text", "text": "Yes."},
    ]
    assert blocks(told) == message["content"]
