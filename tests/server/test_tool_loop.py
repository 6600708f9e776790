"""Tool loops over HTTP: the second turn replays the first answer, whatever the template and the dialect."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.client.engine_client import EngineClient
from quire.client.one_model import OneModel
from quire.core.errors import BadRequest
from quire.engine.options import EngineOptions
from quire.server.app import create_app
from quire.server.options import ServerOptions
from server.running import Running, running

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASK = {"role": "user", "content": "Is it raining in Paris?"}

# Null is refused by both: `+` joins texts alone.
TURNS = (
    "{%% if tools %%}{{ tools | tojson }}{%% endif %%}{%% for m in messages %%}{{ '<|' + m.role + '|>' + m.content }}"
    "{%% for c in m.tool_calls or [] %%}%s{%% endfor %%}<|end|>{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"
)
QWEN3 = TURNS % (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
QWEN3_CODER = TURNS % (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for key, value in c.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
KIMI = TURNS % (
    "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>"
)
HARMONY = TURNS % (
    " to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}"
    "{# <|channel|>final<|message|> #}"
)
ARGUMENTS = '{"city": "Paris", "zip": "75001"}'
SAYS = {
    QWEN3: f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    QWEN3_CODER: "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=zip>\n75001\n</parameter>\n</function>\n</tool_call>",
    KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    HARMONY: f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}",
}


@pytest.mark.parametrize("template", SAYS, ids=["qwen3", "qwen3-coder", "kimi", "harmony"])
def test_an_answer_with_calls_can_be_replayed_as_it_was(client: openai.OpenAI, server: Running, template: str) -> None:
    server.service.tokenizer.chat_template, server.service.says = template, SAYS[template]
    asked: dict[str, Any] = {"model": "fake", "tools": [WEATHER], "max_tokens": 400}
    first = client.chat.completions.create(messages=[ASK], **asked).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content is None
    [call] = first.message.tool_calls
    assert json.loads(call.function.arguments) == json.loads(ARGUMENTS)
    streamed = [
        delta.function.arguments
        for chunk in client.chat.completions.create(messages=[ASK], stream=True, **asked)
        for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert len(streamed) > 5 and "".join(streamed) == call.function.arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    server.service.says = "It rains."
    second = client.chat.completions.create(messages=[ASK, first.message, result], **asked).choices[0]
    assert second.message.content == "It rains."
    stream = server.service.seen[-1]
    assert [message["content"] for message in stream.messages] == [ASK["content"], "", "rain"]


def test_a_kimi_call_keeps_the_id_that_the_model_wrote(client: openai.OpenAI, server: Running) -> None:
    server.service.tokenizer.chat_template, server.service.says = KIMI, SAYS[KIMI]
    flat = [{"type": "function", **WEATHER["function"]}]
    chat = client.chat.completions.create(model="fake", messages=[ASK], tools=[WEATHER], max_tokens=400)
    assert chat.choices[0].message.tool_calls[0].id == "functions.weather:0"
    response = client.responses.create(model="fake", input=[ASK], tools=flat, max_output_tokens=400)
    assert response.output[0].call_id == "functions.weather:0"


def test_calls_without_text_are_replayed_in_every_dialect(server: Running) -> None:
    server.service.tokenizer.chat_template, server.service.says = QWEN3, "It rains."
    arguments = {"city": "Paris"}
    bodies = {
        "/v1/chat/completions": {
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "c", "content": "rain"},
            ],
            "tools": [WEATHER],
        },
        "/v1/responses": {
            "input": [
                ASK,
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "rain"},
            ],
            "tools": [{"type": "function", **WEATHER["function"]}],
        },
        "/v1/messages": {
            "max_tokens": 99,
            "messages": [
                ASK,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": arguments}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "rain"}]},
            ],
            "tools": [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}],
        },
        "/api/chat": {
            "stream": False,
            "messages": [
                ASK,
                {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]},
                {"role": "tool", "tool_name": "weather", "content": "rain"},
            ],
            "tools": [WEATHER],
        },
    }
    for path, body in bodies.items():
        response = server.http.post(path, json={"model": "fake", **body})
        assert response.status_code == 200 and "It rains." in response.text, (path, response.text)
    chat = bodies["/v1/chat/completions"]
    assert server.http.post("/tokenize", json={"model": "fake", **chat}).status_code == 200
    messages = {name: value for name, value in bodies["/v1/messages"].items() if name != "max_tokens"}
    assert server.http.post("/v1/messages/count_tokens", json={"model": "fake", **messages}).is_success


def test_markers_that_are_special_tokens_reach_the_parser(server: Running) -> None:
    tokenizer = server.service.tokenizer
    tokenizer.chat_template = QWEN3
    tokenizer.id_of = {"<tool_call>": 257}.get  # type: ignore[method-assign]
    try:
        assert server.chat(tools=[WEATHER]).status_code == 200
        assert server.service.seen[-1].params.skip_special_tokens is False
        assert server.chat().status_code == 200
        assert server.service.seen[-1].params.skip_special_tokens is True
    finally:
        del tokenizer.id_of  # type: ignore[attr-defined]


def test_a_token_that_ends_calls_ends_the_answer(server: Running) -> None:
    tokenizer = server.service.tokenizer
    tokenizer.chat_template = HARMONY
    tokenizer.id_of = {"<|call|>": 200}.get  # type: ignore[method-assign]
    try:
        server.chat(tools=[WEATHER], stop_token_ids=[7])
        assert server.service.seen[-1].params.stop_token_ids == [7, 200]
        server.chat()
        assert server.service.seen[-1].params.stop_token_ids == []
    finally:
        del tokenizer.id_of  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def trusting() -> Iterator[Running]:
    options = ServerOptions(
        trust_request_chat_template=True, chat_template_kwargs='{"enable_thinking": false, "tone": "dry"}'
    )
    with running(options) as server:
        yield server


def test_a_template_of_a_request_is_refused_unless_requests_are_trusted(server: Running, trusting: Running) -> None:
    own = TURNS % "" + "{{ tone }}"
    refused = server.chat(chat_template=own)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "chat_template"
    assert "--trust-request-chat-template" in refused.json()["error"]["message"]
    prompt = trusting.chat(chat_template=own, return_token_ids=True).json()["prompt_token_ids"]
    assert bytes(prompt).decode() == "<|user|>Hello<|end|><|assistant|>dry"
    broken = trusting.chat(chat_template="{% if")
    assert broken.status_code == 400 and "does not compile" in broken.text


def test_variables_of_the_template_have_defaults_that_requests_override(trusting: Running) -> None:
    trusting.chat()
    assert trusting.service.seen[-1].template_options["enable_thinking"] is False
    trusting.chat(chat_template_kwargs={"enable_thinking": True})
    options = trusting.service.seen[-1].template_options
    assert (options["enable_thinking"], options["tone"]) == (True, "dry")
    trusting.chat(reasoning_effort="high")
    assert trusting.service.seen[-1].template_options["enable_thinking"] is True


@pytest.mark.parametrize("given", ["[]", "{", '{"tools": []}', '{"messages": 1}'])
def test_defaults_that_are_no_object_are_refused_at_the_start(given: str) -> None:
    with pytest.raises(BadRequest, match="chat_template_kwargs is"):
        ServerOptions(chat_template_kwargs=given)


def scoped_tool(name: str, values: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "$defs": {"X": {"enum": values}}, "properties": {"x": {"$ref": "#/$defs/X"}}}
    return {"type": "function", "function": {"name": name, "parameters": {**schema, "required": ["x"]}}}


def test_a_real_engine_calls_and_reads_the_result(tiny_model: Path) -> None:
    tools = [scoped_tool("colour", ["red", "blue"]), scoped_tool("size", ["small", "large"])]
    values = {"colour": ("red", "blue"), "size": ("small", "large")}
    template = QWEN3.replace("{{ tools | tojson }}", "{{ tools | length }}")  # its tokens are bytes

    async def main() -> None:
        options = EngineOptions(model=str(tiny_model), served_model_name="tiny", threads=1, chat_template=template)
        async with EngineClient(options) as engine:
            app = create_app(OneModel(engine, engine.adapters), ServerOptions())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://quire") as http:
                body = {"model": "tiny", "tools": tools, "max_tokens": 300, "seed": 1, "parallel_tool_calls": False}
                forced = {**body, "messages": [ASK], "tool_choice": "required"}
                answer = await http.post("/v1/chat/completions", json=forced)
                assert answer.status_code == 200, answer.text
                first = answer.json()["choices"][0]["message"]
                [call] = first["tool_calls"]
                written = json.loads(call["function"]["arguments"])["x"]
                assert written in values[call["function"]["name"]], "each tool has its own definition of X"
                assert first["content"] is None
                result = {"role": "tool", "tool_call_id": call["id"], "content": "good"}
                replayed = {**body, "messages": [ASK, first, result], "max_tokens": 4, "return_token_ids": True}
                second = await http.post("/v1/chat/completions", json=replayed)
                assert second.status_code == 200, second.text
                prompt = engine.tokenizer.decode(second.json()["prompt_token_ids"], skip_special_tokens=False)
                assert f'<|assistant|><tool_call>\n{{"name": "{call["function"]["name"]}"' in prompt
                assert prompt.endswith("<|tool|>good<|end|><|assistant|>")

    asyncio.run(main())
