"""Tools, formats and thoughts through the `openai` package: what the engine is asked, and what is made of its text."""

import json
from typing import Any

import openai
import pytest

from quire.core.structured import Structured
from server.fake_service import CHATML
from server.running import Running

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
ASK = [{"role": "user", "content": "How is it in Paris?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[dict[str, Any], str | None]:
    """The message that the deltas make, as every client of the API folds them; and the reason of its end."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    reason = None
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_none=True)
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"] and call["type"] == "function"
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            reason = choice.finish_reason or reason
    return message, reason


def test_a_call_is_found_in_the_text(client: openai.OpenAI, server: Running) -> None:
    server.service.says = f"Let me see. {CALL}\n{CALL}"
    asked = {"model": "fake", "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 400}
    full = client.chat.completions.create(**asked).choices[0]
    assert full.finish_reason == "tool_calls" and full.message.content == "Let me see."
    assert [call.function.name for call in full.message.tool_calls] == ["weather", "weather"]
    assert json.loads(full.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    assert len({call.id for call in full.message.tool_calls}) == 2
    message, reason = streamed(client, **asked)
    assert reason == "tool_calls" and message["content"] == "Let me see."
    assert message["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Paris"}'}] * 2
    alone = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message
    assert len(alone.tool_calls) == 1
    system = server.service.seen[-1].messages[0]
    assert system["role"] == "system" and "The weather in a city" in system["content"], "its template knows no tools"


def test_arguments_are_streamed_while_they_are_written(client: openai.OpenAI, server: Running) -> None:
    server.service.says = CALL
    deltas = [
        chunk.choices[0].delta.tool_calls[0].function.arguments
        for chunk in client.chat.completions.create(
            model="fake", messages=ASK, tools=[WEATHER], max_tokens=400, stream=True
        )
        if chunk.choices[0].delta.tool_calls
    ]
    assert len(deltas) > 10 and "".join(deltas) == '{"city": "Paris"}'


def test_an_answer_without_calls_is_an_answer(client: openai.OpenAI, server: Running) -> None:
    server.service.says = "It rains in <Paris>."
    full = client.chat.completions.create(model="fake", messages=ASK, tools=[WEATHER], max_tokens=99).choices[0]
    assert (full.message.content, full.message.tool_calls, full.finish_reason) == (server.service.says, None, "stop")
    server.service.says = CALL
    none = {"model": "fake", "messages": ASK, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 99}
    assert client.chat.completions.create(**none).choices[0].message.content == CALL
    assert server.service.seen[-1].messages == ASK


def test_a_call_that_is_cut_off_ends_for_its_length(client: openai.OpenAI, server: Running) -> None:
    server.service.says = CALL
    message, reason = streamed(client, model="fake", messages=ASK, tools=[WEATHER], max_tokens=len(CALL) - 25)
    assert reason == "length" and message["tool_calls"][0]["arguments"].startswith('{"city')


def test_a_required_call_is_a_language(client: openai.OpenAI, server: Running) -> None:
    server.service.says = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
    asked = {"model": "fake", "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 99}
    message, reason = streamed(client, **asked, tool_choice="required")
    assert message["tool_calls"] == [{"name": "weather", "arguments": '{"city": "Paris"}'}] and reason == "tool_calls"
    structured = server.service.seen[-1].params.structured
    assert structured.kind == "json_schema" and json.loads(structured.text)["minItems"] == 1

    server.service.says = '{"city": "Paris"}'
    named = {"type": "function", "function": {"name": "weather"}}
    full = client.chat.completions.create(**asked, tool_choice=named).choices[0]
    assert full.message.content is None and full.finish_reason == "tool_calls"
    assert [(call.function.name, call.function.arguments) for call in full.message.tool_calls] == [
        ("weather", '{"city": "Paris"}')
    ]
    structured = server.service.seen[-1].params.structured
    assert json.loads(structured.text) == {**WEATHER["function"]["parameters"], "additionalProperties": False}


def test_some_of_the_tools_may_be_allowed(client: openai.OpenAI, server: Running) -> None:
    """Chats and responses name them in ways of their own."""
    server.service.says = '[{"name": "weather", "arguments": {"city": "Paris"}}]'
    chat = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [WEATHER]}}
    asked = {"model": "fake", "messages": ASK, "tools": [WEATHER, TIME], "max_tokens": 99}
    full = client.chat.completions.create(**asked, tool_choice=chat).choices[0]
    assert full.message.tool_calls[0].function.name == "weather"
    forced = server.service.seen[-1]
    flat = [{"type": "function", **tool["function"]} for tool in (WEATHER, TIME)]
    response = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    client.responses.create(model="fake", input=ASK, tools=flat, tool_choice=response, max_output_tokens=99)
    assert server.service.seen[-1].params.structured == forced.params.structured
    assert "weather" in forced.params.structured.text and "time" not in forced.params.structured.text

    chat["allowed_tools"]["mode"] = "auto"
    client.chat.completions.create(**asked, tool_choice=chat)
    told = server.service.seen[-1]
    assert told.params.structured is None
    assert "weather" in told.messages[0]["content"] and '"time"' not in told.messages[0]["content"]
    chat["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "nobody"}}]
    with pytest.raises(openai.BadRequestError, match="tool_choice allows `nobody`"):
        client.chat.completions.create(**asked, tool_choice=chat)


def test_a_forced_call_makes_a_format_idle(client: openai.OpenAI, server: Running) -> None:
    server.service.says = '{"city": "Paris"}'
    asked = {"model": "fake", "messages": ASK, "tools": [WEATHER], "response_format": {"type": "json_object"}}
    full = client.chat.completions.create(
        **asked, tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=99
    )
    assert full.choices[0].message.tool_calls


def test_tools_beside_a_format_may_be_called(client: openai.OpenAI, server: Running) -> None:
    """The answer follows the schema, or it is a call."""
    strict = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    asked = {"model": "fake", "messages": ASK, "tools": [WEATHER], "response_format": strict, "max_tokens": 99}
    server.service.says = CALL
    assert client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function.name == "weather"
    structured = server.service.seen[-1].params.structured
    assert structured.kind == "structural_tag" and structured.disable_additional_properties
    answer, call = json.loads(structured.text)["format"]["elements"]
    assert answer["json_schema"] == SCHEMA and call["tags"][0]["begin"] == "<tool_call>\n"
    server.service.says = '{"a": 1}'
    assert client.chat.completions.create(**asked).choices[0].message.content == '{"a": 1}'
    client.chat.completions.create(**asked, tool_choice="none")
    assert server.service.seen[-1].params.structured.kind == "json_schema"


def test_a_format_is_refused_where_calls_have_no_marker(server: Running) -> None:
    server.service.tokenizer.chat_template = CHATML + "{% if tools %}Environment: ipython{% endif %}"
    response = server.chat(tools=[WEATHER], response_format={"type": "json_object"})
    assert response.status_code == 400 and response.json()["error"]["param"] == "tools", response.text


def test_a_conversation_with_calls_reaches_the_template(client: openai.OpenAI, server: Running) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
    assert [message["role"] for message in server.service.seen[-1].messages] == ["system", "user", "assistant", "user"]

    server.service.tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
    )
    client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
    request = server.service.seen[-1]
    assert request.template_options["tools"] == [WEATHER]
    assert request.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert request.messages[2] == messages[2]

    broken = {**call, "function": {"name": "weather", "arguments": "{"}}
    client.chat.completions.create(model="fake", messages=[*ASK, {"role": "assistant", "tool_calls": [broken]}])
    shown = server.service.seen[-1].messages[1]["tool_calls"][0]["function"]["arguments"]
    assert shown == {"arguments": "{"}, "an agent sends back what the model wrote, and goes on"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "yaml", "value": {}}}, "response_format.value"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
        ({"guided_json": {}, "guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_what_is_wrong_is_named(server: Running, body: dict[str, Any], param: str) -> None:
    response = server.chat(**body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("body", "language"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured("json")),
        ({"response_format": {"type": "json_object", "value": {}}}, Structured("json_schema", "{}")),  # as TGI has it
        ({"response_format": {"type": "json_schema", "value": {"schema": {}}}}, Structured("json_schema", "{}")),
        ({"response_format": {"type": "regex", "value": "a+"}}, Structured("regex", "a+")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            Structured("json_schema", json.dumps(SCHEMA), disable_additional_properties=True),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            Structured("json_schema", json.dumps(SCHEMA)),
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},  # as llama.cpp has it
            Structured("json_schema", json.dumps(SCHEMA), disable_additional_properties=True),
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            Structured("structural_tag", '{"format": {"type": "any_text"}}'),
        ),
        (
            {"response_format": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
            Structured("structural_tag", '{"structures": [], "triggers": ["<"]}'),
        ),
        (
            {"structured_outputs": {"structural_tag": '{"format": {"type": "any_text"}}'}},
            Structured("structural_tag", '{"format": {"type": "any_text"}}'),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True, "whitespace_pattern": " ?"}},
            Structured("json_schema", json.dumps(SCHEMA), " ?", True),
        ),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            Structured("json", whitespace_pattern=""),
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}},
            Structured("json", whitespace_pattern=""),
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": r"\s?"},
            Structured("json_schema", json.dumps(SCHEMA), r"\s?"),
        ),
        ({"guided_json": SCHEMA}, Structured("json_schema", json.dumps(SCHEMA))),
        ({"guided_json": json.dumps(SCHEMA)}, Structured("json_schema", json.dumps(SCHEMA))),
        ({"guided_regex": "a+"}, Structured("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, Structured("choice", '["a", "b"]')),
        ({"guided_grammar": "root ::= 'a'"}, Structured("grammar", "root ::= 'a'")),
        ({"structured_outputs": {"regex": "a+"}}, Structured("regex", "a+")),
        ({"structured_outputs": {"json_object": True}}, Structured("json")),
        ({"structured_outputs": {"json_object": False, "choice": ["é"]}}, Structured("choice", '["é"]')),
    ],
)
def test_a_format_becomes_a_language(server: Running, body: dict[str, Any], language: Structured | None) -> None:
    for post in (server.chat, server.complete):
        response = post(**body)
        assert response.status_code == 200, response.text
        assert server.service.seen[-1].params.structured == language


def test_thoughts_are_split_from_the_answer(client: openai.OpenAI, server: Running) -> None:
    server.service.tokenizer.chat_template = CHATML + "{% if enable_thinking %}<think></think>{% endif %}"
    server.service.says = "<think>\nRain?\n</think>\n\nIt rains."
    asked = {"model": "fake", "messages": ASK, "max_tokens": 99}
    full = client.chat.completions.create(**asked).choices[0].message
    assert (full.content, full.reasoning_content, full.reasoning) == ("It rains.", "Rain?", "Rain?")
    message, reason = streamed(client, **asked)
    assert (message["content"], message["reasoning_content"], reason) == ("It rains.", "Rain?", "stop")
    hidden = client.chat.completions.create(**asked, extra_body={"include_reasoning": False}).choices[0].message
    assert hidden.content == "It rains." and hidden.reasoning_content is None
    client.chat.completions.create(**asked, reasoning_effort="none")
    options = server.service.seen[-1].template_options
    assert (options["reasoning_effort"], options["enable_thinking"]) == ("none", False)


def test_a_prompt_may_open_the_thoughts(client: openai.OpenAI, server: Running) -> None:
    server.service.tokenizer.chat_template = CHATML + "<think>\n{# closed by </think> #}"
    server.service.says = "Rain? </think> It rains."
    full = client.chat.completions.create(model="fake", messages=ASK, max_tokens=99).choices[0].message
    assert (full.content, full.reasoning_content) == ("It rains.", "Rain?")
    server.service.says = '{"rain": true}'
    asked = {"model": "fake", "messages": ASK, "response_format": {"type": "json_object"}, "max_tokens": 99}
    assert client.chat.completions.create(**asked).choices[0].message.content == server.service.says


def test_a_developer_is_the_system_where_the_template_knows_none(client: openai.OpenAI, server: Running) -> None:
    developer = {"role": "developer", "content": "Be short."}
    client.chat.completions.create(model="fake", messages=[developer, *ASK])
    assert server.service.seen[-1].messages[0] == {"role": "system", "content": "Be short."}


def test_images_are_refused_by_name(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="`image_url` is not supported"):
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": [image]}])


def test_a_suffix_is_filled_in_where_the_model_can(server: Running) -> None:
    tokenizer = server.service.tokenizer
    names = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}
    tokenizer.id_of = names.get  # type: ignore[method-assign]
    try:
        assert server.complete(prompt="def f", suffix="return x").status_code == 200
        assert server.service.seen[-1].prompt_ids == [256, 1, *b"def f", 2, *b"return x", 3]
        assert server.service.seen[-1].params.stop_token_ids == [1, 2, 3], "another gap is no part of this one"
        asked = {"model": "fake", "prompt": "def f", "suffix": "return x", "stream": False}
        assert server.http.post("/api/generate", json=asked).status_code == 200
        assert server.service.seen[-1].prompt_ids == server.service.seen[-2].prompt_ids
        assert server.complete(prompt="def f", suffix="x", echo=True).json()["error"]["param"] == "suffix"
    finally:
        del tokenizer.id_of  # type: ignore[attr-defined]
