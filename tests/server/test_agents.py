"""What coding agents and chat programs send, turn by turn: hints are taken, and tools that others run are left out."""

import json
from typing import Any

import anthropic
import httpx
import openai
import pytest

from server.fake_service import CHATML
from server.running import Running

THINKS = CHATML + "{# <think> </think> #}"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "In a city", "parameters": CITY}}
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


# -- Codex: responses, streamed, nothing stored ------------------------------------------------------------------------

PATCH_GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}
CODEX_TOOLS = [
    {"type": "function", "name": "exec_command", "description": "Runs it", "strict": False, "parameters": CITY},
    {"type": "custom", "name": "apply_patch", "description": "Edits files", "format": PATCH_GRAMMAR},
    {"type": "web_search", "external_web_access": False},
    {"type": "image_generation", "output_format": "png"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools", "parameters": {}},
    {
        "type": "namespace",
        "name": "mcp__docs__",
        "description": "Documentation",
        "tools": [{"type": "function", "name": "find", "strict": False, "parameters": CITY}],
    },
]


def codex(server: Running, *items: dict[str, Any], **more: Any) -> httpx.Response:
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]}
    rules = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before rm."}]}
    body = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "input": [rules, said, *items],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "service_tier": "priority",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
    }
    return server.http.post("/v1/responses", json={**body, **more})


def test_codex_edits_a_file_and_goes_on(server: Running) -> None:
    server.service.tokenizer.chat_template = THINKS
    patch = '*** Begin Patch\n"x"\n*** End Patch'
    server.service.says = f"<think>\nA patch.\n</think>\n\n{call('apply_patch', input=patch)}"
    reply = codex(server)
    assert reply.headers["x-quire-ignored"] == (
        "tools[2] (web_search), tools[3] (image_generation), tools[4] (tool_search)"
    )
    told = events(reply)
    [reasoning, edit] = [event["item"] for event in told if event["type"] == "response.output_item.done"]
    assert (edit["type"], edit["name"], edit["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert [event["delta"] for event in told if event["type"].endswith("call_input.delta")] == [patch]
    assert told[-1]["type"] == "response.completed" and told[-1]["response"]["usage"]["output_tokens"]
    shown = server.service.seen[-1].messages
    assert [message["role"] for message in shown] == ["system", "user"], "instructions and the developer's are one"
    system = shown[0]["content"]
    assert "Begin Patch" in system and "mcp__docs__find" in system and "image_generation" not in system

    server.service.says = "Done."
    seal = reasoning["encrypted_content"]
    back = codex(
        server,
        {"type": "reasoning", "summary": [], "encrypted_content": seal},  # without its text, as Codex sends it
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": edit["call_id"],
            "name": "apply_patch",
            "input": patch,
        },
        {"type": "custom_tool_call_output", "call_id": edit["call_id"], "output": "Success."},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    )
    assert events(back)[-1]["response"]["status"] == "completed"
    _, _, assistant, result = server.service.seen[-1].messages
    assert assistant["reasoning_content"] == "A patch." and patch.splitlines()[0] in assistant["content"]
    assert "Success." in result["content"]


def test_codex_calls_a_tool_of_a_namespace(server: Running) -> None:
    server.service.says = call("mcp__docs__find", city="Rome")
    [item] = [event["item"] for event in events(codex(server)) if event["type"] == "response.output_item.done"]
    assert (item["namespace"], item["name"]) == ("mcp__docs__", "find")
    assert json.loads(item["arguments"]) == {"city": "Rome"}
    parts = [{"type": "input_text", "text": "Found"}, {"type": "input_text", "text": "it."}]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": parts}
    given = {name: item[name] for name in ("type", "name", "namespace", "arguments", "call_id")}
    assert events(codex(server, given, output))
    assert "mcp__docs__find" in server.service.seen[-1].messages[2]["content"]


def test_what_another_server_encrypted_is_passed_over(server: Running) -> None:
    foreign = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "gAAAA"}
    broken = {"type": "reasoning", "summary": [], "encrypted_content": "quire:%%"}
    assert events(codex(server, foreign, broken))
    assert [message["role"] for message in server.service.seen[-1].messages] == ["system", "user"]


def test_a_session_begins_with_instructions_alone(server: Running) -> None:
    body = {"model": "fake", "instructions": "Be brief.", "input": [], "max_output_tokens": 1}
    assert server.http.post("/v1/responses", json=body).status_code == 200


def test_items_are_named_by_their_ids_instead_of_being_sent_again(client: openai.OpenAI, server: Running) -> None:
    """As Vercel's AI SDK does with what is stored."""
    flat = {"type": "function", **WEATHER["function"]}
    server.service.says = call("weather", city="Rome")
    first = client.responses.create(model="fake", input="Rome?", tools=[flat])
    [asked] = first.output
    server.service.says = "It rains."
    given: Any = [
        {"role": "user", "content": "Rome?"},
        {"type": "item_reference", "id": asked.id},
        {"type": "function_call_output", "call_id": asked.call_id, "output": "rain"},
    ]
    assert client.responses.create(model="fake", input=given, tools=[flat]).output_text == "It rains."
    assert '"Rome"' in server.service.seen[-1].messages[-2]["content"]


# -- Claude Code: messages, streamed, with blocks to be cached ---------------------------------------------------------

EPHEMERAL = {"type": "ephemeral"}
CLAUDE_TOOLS: list[Any] = [
    {"name": "Bash", "description": "Runs it", "input_schema": CITY, "cache_control": EPHEMERAL},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": ["example.com"]},
]


def claude(server: Running, *messages: Any, **more: Any) -> anthropic.types.beta.BetaMessage:
    given: dict[str, Any] = {
        "model": "fake",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "You are a coding agent.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "Today is Monday."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "List files", "cache_control": EPHEMERAL}]},
            *messages,
        ],
        "tools": CLAUDE_TOOLS,
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": "user_1"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": ["claude-code-20250219", "context-management-2025-06-27"],
        "service_tier": "auto",
        **more,
    }
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        counted = {name: given[name] for name in ("model", "system", "messages", "tools", "thinking")}
        assert client.beta.messages.count_tokens(**counted).input_tokens > 10
        with client.beta.messages.stream(**given) as stream:
            message = stream.get_final_message()
            said = stream.response.headers["x-quire-ignored"]
            assert "tools.1 (web_search_20250305)" in said and "context_management" in said
            return message


@pytest.mark.parametrize("template", [CHATML, THINKS])
def test_claude_code_runs_a_command_and_goes_on(server: Running, template: str) -> None:
    server.service.tokenizer.chat_template = template
    thinks = template == THINKS
    server.service.says = ("<think>\nls.\n</think>\n\n" if thinks else "") + call("Bash", city="ls")
    message = claude(server)
    assert [block.type for block in message.content] == (["thinking"] if thinks else []) + ["tool_use"]
    assert message.stop_reason == "tool_use"
    if thinks:
        assert message.content[0].signature, "clients drop reasoning without one"
    server.service.says = "Two files."
    result = {
        "type": "tool_result",
        "tool_use_id": message.content[-1].id,
        "content": [{"type": "text", "text": "a.py"}, {"type": "text", "text": "b.py"}],
        "is_error": False,
        "cache_control": EPHEMERAL,
    }
    content = [block.model_dump(exclude_none=True) for block in message.content]
    answer = claude(
        server,
        {"role": "assistant", "content": content},
        {"role": "user", "content": [result, {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}]},
        {"role": "system", "content": "The user is away."},
    )
    assert [block.text for block in answer.content] == ["Two files."]
    shown = server.service.seen[-1].messages
    assert shown[0]["content"].startswith("You are a coding agent.\nToday is Monday.")
    assert shown[2].get("reasoning_content") == ("ls." if thinks else None)
    assert "a.py\nb.py" in shown[3]["content"] and shown[-1]["content"] == "The user is away."


def test_reasoning_is_left_out_where_the_client_says_so(server: Running) -> None:
    server.service.tokenizer.chat_template = THINKS
    server.service.says = "<think>\nls.\n</think>\n\nYes."
    thinking, text = claude(server, thinking={"type": "adaptive", "display": "omitted"}).content
    assert (thinking.thinking, bool(thinking.signature), text.text) == ("", True, "Yes.")


def test_what_anthropics_servers_did_in_earlier_turns_is_passed_over(server: Running) -> None:
    content = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "Found it."},
    ]
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "a"},
    }
    claude(server, {"role": "assistant", "content": content}, {"role": "user", "content": [document]})
    assert [message["content"] for message in server.service.seen[-1].messages[2:]] == ["Found it.", "Notes\na"]


# -- Chats -------------------------------------------------------------------------------------------------------------

HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
CALLED: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "Rome?", "cache_control": EPHEMERAL}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CHATS: dict[str, dict[str, Any]] = {
    "aider": {"messages": HELLO, "temperature": 0, "stream": True},
    "aider continues an answer": {
        "messages": [*HELLO, {"role": "assistant", "content": "I was", "prefix": True}],
        "temperature": 0,
    },
    "cline": {
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 64,
        "reasoning_effort": "medium",
        "tools": [WEATHER],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        **STREAM,
    },
    "roo": {
        "messages": CALLED,
        "max_completion_tokens": 64,
        "thinking": {"type": "enabled"},
        "tools": [WEATHER],
        **STREAM,
    },
    "continue": {
        "messages": CALLED,
        "max_tokens": 64,
        "tools": [WEATHER],
        "prediction": {"type": "content", "content": "x"},
    },
    "open webui": {"messages": HELLO, "stream": True, "top_k": 40, "min_p": 0.05, "enable_thinking": False},
    "opencode": {
        "messages": [
            {"role": "system", "content": "Be brief.", "cache_control": EPHEMERAL},
            CALLED[0],
            {**CALLED[1], "content": "", "reasoning_content": "hm", "reasoning_details": [{"type": "reasoning.text"}]},
            CALLED[2],
        ],
        "max_tokens": 64,
        "verbosity": "low",
        "tools": [WEATHER],
        "tool_choice": "auto",
        **STREAM,
    },
    "zed": {
        "messages": CALLED,
        "stop": [],
        "temperature": 1.0,
        "parallel_tool_calls": False,
        "prompt_cache_key": "thread",
        "tools": [WEATHER],
        **STREAM,
    },
    "librechat": {"messages": HELLO, "user": "64f1", "store": True, "service_tier": "flex", **STREAM},
    "langchain": {
        "messages": [*CALLED, {"role": "assistant", "content": "Rain.", "name": "bot"}, HELLO[1]],
        "n": 1,
        "seed": 3,
        "metadata": {"run": {"id": 1}},
        "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}],
    },
    "llamaindex": {"messages": [*CALLED, {"role": "assistant", "content": None}, HELLO[1]], "temperature": 0.1},
    "n8n": {
        "messages": HELLO,
        "frequency_penalty": 0,
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "safety_identifier": "u",
        "prompt_cache_retention": "24h",
        "stream_options": {"include_usage": True, "include_obfuscation": True},
        "stream": True,
    },
    "litellm": {
        "messages": [*CALLED[:1], {**CALLED[1], "function_call": None, "provider_specific_fields": {}}, CALLED[2]],
        "tools": [WEATHER, {"type": "web_search_preview"}],
        "web_search_options": {"search_context_size": "low"},
    },
}


@pytest.mark.parametrize("program", CHATS)
def test_a_chat_of(server: Running, program: str) -> None:
    reply = server.http.post("/v1/chat/completions", json={"model": "fake", **CHATS[program]})
    assert reply.status_code == 200, reply.text


def test_tools_that_are_left_out_are_named_in_a_header(server: Running) -> None:
    reply = server.http.post("/v1/chat/completions", json={"model": "fake", **CHATS["litellm"]})
    assert reply.headers["x-quire-ignored"] == "web_search_options, tools[1] (web_search_preview)"
    chosen = {"tools": [WEATHER, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}
    refused = server.http.post("/v1/chat/completions", json={"messages": HELLO, **chosen})
    assert refused.status_code == 400 and "`web_search` is not supported" in refused.text


def test_the_header_has_nothing_that_a_client_made_up(server: Running) -> None:
    """It is written in Latin-1, and an Arabic digit is a digit."""
    made_up = {"type": "web_search_20٢٥_٠٨_٢٦", "name": "x"}
    assert server.http.post("/v1/chat/completions", json={"messages": HELLO, "tools": [made_up]}).status_code == 400
    body = {"model": "fake", "max_tokens": 9, "messages": HELLO[1:]}
    for kind in ("web_search_20٢٥٠٣٠٥", "x" * 70000 + "_20250305", "web_search_20250305\n"):
        assert server.http.post("/v1/messages", json={**body, "tools": [{"type": kind}]}).status_code == 400
    many = [{"type": "web_search"}] * 5000
    reply = server.http.post("/v1/chat/completions", json={"messages": HELLO, "tools": many})
    assert reply.status_code == 200 and len(reply.headers["x-quire-ignored"]) < 1000


def test_openais_package_folds_a_custom_call(client: openai.OpenAI, server: Running) -> None:
    server.service.says = call("shell", input="ls")
    tools: Any = [{"type": "custom", "name": "shell"}]
    with client.responses.stream(model="fake", input="Hello", tools=tools) as stream:
        told = [event.type for event in stream]
        [item] = stream.get_final_response().output
    assert (item.type, item.input) == ("custom_tool_call", "ls")
    assert "response.custom_tool_call_input.done" in told
    [again] = client.responses.create(model="fake", input="Hello", tools=tools).output
    assert (again.type, again.name, again.input) == ("custom_tool_call", "shell", "ls")
    server.service.says = "Done."
    results: Any = [{"type": "custom_tool_call_output", "call_id": again.call_id, "output": "a.py"}]
    first = client.responses.create(model="fake", input=[again, *results], tools=tools)
    assert first.output_text == "Done."


def test_a_custom_tool_of_a_chat(client: openai.OpenAI, server: Running) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
    tools: Any = [{"type": "custom", "custom": {"name": "shell", "description": "Runs it", "format": grammar}}, WEATHER]
    server.service.says = call("shell", input="ls -l") + call("weather", city="Rome")
    asked: Any = {"model": "fake", "messages": HELLO, "tools": tools}
    message = client.chat.completions.create(**asked).choices[0].message
    shell, weather = message.tool_calls
    assert (shell.type, shell.custom.name, shell.custom.input) == ("custom", "shell", "ls -l")
    assert weather.function.arguments == '{"city": "Rome"}'
    assert "[a-z]+" in server.service.seen[-1].messages[0]["content"]
    deltas = [
        delta
        for chunk in client.chat.completions.create(**asked, stream=True)
        for delta in chunk.choices[0].delta.tool_calls or []
    ]
    assert deltas[0].index == 0 and deltas[0].model_extra["custom"] == {"name": "shell", "input": "ls -l"}
    assert "".join(delta.function.arguments for delta in deltas[1:]) == '{"city": "Rome"}'
    results: Any = [{"role": "tool", "tool_call_id": each.id, "content": "ok"} for each in (shell, weather)]
    client.chat.completions.create(model="fake", messages=[*HELLO, message, *results], tools=tools)
    assert '"ls -l"' in server.service.seen[-1].messages[2]["content"]
    chosen = {"type": "custom", "custom": {"name": "shell"}}
    server.service.says = '{"input": "pwd"}'
    [forced] = client.chat.completions.create(**asked, tool_choice=chosen).choices[0].message.tool_calls
    assert forced.custom.input == "pwd"


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/chat/completions", [{"type": "image_url", "image_url": {"url": PICTURE}}]),
        ("/v1/responses", [{"type": "input_image", "image_url": PICTURE}]),
        ("/v1/messages", [{"type": "image", "source": {"type": "url", "url": "https://example.com/x.png"}}]),
        (
            "/v1/messages",
            [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {"type": "url"}}]}],
        ),
    ],
)
def test_an_image_is_refused_with_the_reason(server: Running, path: str, content: Any) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    body = {"model": "fake", "max_tokens": 9, field: [{"role": "user", "content": content}]}
    if path == "/v1/responses":
        del body["max_tokens"]
    reply = server.http.post(path, json=body)
    assert reply.status_code == 400 and "this model takes text, and no images" in reply.text
