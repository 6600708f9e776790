"""What chat templates can render, and that parsers read back what templates write for a tool call."""

import json
import random
from typing import Any

import pytest

from quire.core.errors import BadRequest
from quire.text.chat.chat_format import ChatFormat, chat_format
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tools import formats
from quire.text.tools.params import ToolParams

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "zip": {"type": "string"}}
USE = ToolParams(
    [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}},
        },
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]
)
CALLS = [("weather", {"city": 'Paris "x"', "days": 3, "zip": "75001"}), ("now", {})]

TURNS = (
    "{%% if tools %%}{{ tools | tojson }}{%% endif %%}{%% for m in messages %%}<|{{ m.role }}|>{{ m.content }}"
    "{%% if m.tool_calls %%}%s{%% endif %%}<|end|>{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|assistant|>{%% endif %%}"
)
EACH = "{%% for c in m.tool_calls %%}%s{%% endfor %%}"
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
PAIRS = "{%% for key, value in c.function.arguments.items() %%}%s{%% endfor %%}"
VALUE = "{{ value if value is string else value | tojson }}"
JSON_LIST = (
    "[{% for c in m.tool_calls %}"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
)


def tags(begin: str, opens: str, closes: str, end: str) -> str:
    return EACH % (begin + PAIRS % (opens + VALUE + closes) + end)


# How families write their calls: enough of it that the format is recognized.
TEMPLATES = {
    "hermes": EACH
    % '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
    "mistral": EACH % f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{ARGUMENTS}",
    "qwen3_coder": tags(
        f"<tool_call>\n<function={NAME}>\n", "<parameter={{ key }}>\n", "\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "seed_oss": tags(
        f"<seed:tool_call>\n<function={NAME}>\n",
        "<parameter={{ key }}>",
        "</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "glm45": tags(
        f"<tool_call>{NAME}\n", "<arg_key>{{ key }}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"
    ),
    "minimax_m2": tags(
        f'<minimax:tool_call>\n<invoke name="{NAME}">\n',
        '<parameter name="{{ key }}">',
        "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ),
    "deepseek_v32": "<｜DSML｜function_calls>"
    + tags(
        f'<｜DSML｜invoke name="{NAME}">',
        """<｜DSML｜parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">""",
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
    )
    + "</｜DSML｜function_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + EACH % f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
    + "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>"
    + EACH % f"<|tool_call_begin|>functions.{NAME}:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
    + "<|tool_calls_section_end|>",
    "granite": "<|tool_call|>" + JSON_LIST,
    "nemotron_json": f"<TOOLCALL>{JSON_LIST}</TOOLCALL>",
    "hunyuan_a13b": f"<tool_calls>{JSON_LIST}</tool_calls>",
    "cohere_command3": f"<|START_ACTION|>{JSON_LIST.replace('name', 'tool_name', 1)}<|END_ACTION|>",
    "apertus": "<|tools_prefix|>[" + EACH % f'{{"{NAME}": {ARGUMENTS}}}' + "]<|tools_suffix|>",
    "functionary": EACH % f"<function={NAME}>{ARGUMENTS}</function>",
    "openai": EACH % f" to=functions.{NAME}<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
    + "{# <|channel|>final<|message|> #}",
}


def conversation(calls: list[tuple[str, dict[str, Any]]], content: str | None = None) -> list[dict[str, Any]]:
    given = [
        {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in given]
    return [{"role": "user", "content": "Go"}, {"role": "assistant", "content": content, "tool_calls": given}, *results]


def read(form: ChatFormat, pieces: list[str]) -> list[tuple[str, Any]]:
    reader = form.reader(USE)
    assert reader is not None
    calls: list[list[str]] = []
    for delta in [*map(reader.push, pieces), reader.push("", ended=True)]:
        for call in delta.calls:
            if call.name:
                calls.append([call.name, ""])
            calls[-1][1] += call.arguments
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_for_calls_is_read_back(name: str) -> None:
    source = TURNS % TEMPLATES[name]
    form = chat_format(source)
    assert form.tools is formats.load(name)
    messages = form.messages(conversation(CALLS), USE)
    text = ChatTemplate(source).render(messages, tools=form.template_tools(USE))
    answer = text.split("<|assistant|>", 1)[1].split("<|end|>")[0]
    assert read(form, [answer]) == CALLS
    assert read(form, list(answer)) == CALLS
    cuts = sorted(random.Random(name).sample(range(1, len(answer)), 12))
    assert read(form, [answer[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]) == CALLS


STRICT = TURNS % TEMPLATES["hermes"]  # refuses nothing
PLUS = STRICT.replace("{{ m.content }}", "{{ '' + m.content }}")  # as Qwen3's and many others: null is no text
IS_NONE = STRICT.replace("{% if m.tool_calls %}", "{% if m.content is none %}").replace(
    "{{ m.content }}", "{{ m.content or '' }}"
)


@pytest.mark.parametrize("source", [STRICT, PLUS, IS_NONE])
@pytest.mark.parametrize("messages", [conversation(CALLS[:1]), [{"role": "user", "content": "Go"}, {"role": "user"}]])
def test_a_template_sees_no_null_content_unless_it_needs_it(source: str, messages: list[dict[str, Any]]) -> None:
    form = chat_format(source)
    text = ChatTemplate(source).render(form.messages(messages, USE), tools=form.template_tools(USE))
    assert "None" not in text
    assert ("<tool_call>\n" in text.split("Go")[1]) == ("tool_calls" in messages[1])
    assert form.traits.null_content == (source is IS_NONE)


def test_arguments_are_text_where_a_template_joins_them_to_text() -> None:
    source = TURNS % (EACH % "{{ '<tool_call>' + c.function.name + c.function.arguments + '</tool_call>' }}")
    form = chat_format(source)
    assert form.traits.text_arguments
    call = form.messages(conversation(CALLS))[1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == CALLS[0][1]
    assert not chat_format(TURNS % TEMPLATES["hermes"]).traits.text_arguments
    printed = TURNS % (EACH % "<tool_call>{{ c.function.arguments }}</tool_call>")
    assert chat_format(printed).traits.text_arguments, "Python's notation of a dict is not JSON"


def test_a_template_with_one_call_a_message_gets_one_message_a_call() -> None:
    one = "{{ raise_exception('one call!') if m.tool_calls | length > 1 }}"
    form = chat_format(TURNS % (one + TEMPLATES["hermes"]))
    assert form.traits.one_call
    messages = form.messages(conversation(CALLS, "Let me see."))
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [len(message.get("tool_calls", ())) for message in messages] == [0, 1, 0, 1, 0]
    assert [message["content"] for message in messages if "tool_calls" in message] == ["Let me see.", ""]
    assert not chat_format(TURNS % TEMPLATES["hermes"]).traits.one_call


@pytest.mark.parametrize(("sign", "name"), [("<|tool_call|>", "granite"), ("<|tool_list_start|>", "lfm2")])
def test_calls_that_a_template_leaves_out_are_written_into_the_content(sign: str, name: str) -> None:
    source = TURNS % f"{{# {sign} #}}"
    form = chat_format(source)
    assert form.tools is formats.load(name) and not form.traits.shows_calls
    message = form.messages(conversation(CALLS, "So: "), USE)[1]
    assert "tool_calls" not in message and message["content"].startswith("So: ")
    assert read(form, [message["content"]]) == CALLS


NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles!') }}"
    "{% endif %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)


def test_without_a_system_role_the_user_says_what_the_system_would() -> None:
    form = chat_format(NO_SYSTEM)
    system = {"role": "developer", "content": "Be short."}
    assert form.messages([system, {"role": "user", "content": "Go"}]) == [
        {"role": "user", "content": "Be short.\n\nGo"}
    ]
    messages = form.messages([system, *conversation(CALLS)], USE)
    text = ChatTemplate(NO_SYSTEM).render(messages)
    assert text.startswith("<user>Be short.\n\n") and '"name": "weather"' in text.split("<assistant>")[0]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert form.messages([system])[0]["role"] == "user"
    silent = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    assert form.traits.has_system is chat_format(silent).traits.has_system is False


def test_calls_and_results_without_ids_are_matched_in_their_order() -> None:
    talk = conversation(CALLS)
    for call in talk[1]["tool_calls"]:
        del call["id"]
    for result in talk[2:]:
        del result["tool_call_id"]
    messages = chat_format(TURNS % TEMPLATES["hermes"]).messages([*talk, *talk])
    ids = [call["id"] for message in messages for call in message.get("tool_calls", ())]
    assert len(set(ids)) == 4 and [m["tool_call_id"] for m in messages if m["role"] == "tool"] == ids


def test_ids_that_mistral_would_refuse_are_replaced() -> None:
    form = chat_format(TURNS % TEMPLATES["mistral"])
    talk = conversation(CALLS[:1])
    talk[1]["tool_calls"][0]["id"] = talk[2]["tool_call_id"] = "call_0123456789abcdef"
    _, message, result = form.messages(talk)
    assert len(result["tool_call_id"]) == 9 and message["tool_calls"][0]["id"] == result["tool_call_id"]
    assert form.messages(conversation(CALLS[:1]))[2]["tool_call_id"] == "call00000", "this one is fine"


def test_ids_that_kimi_was_not_trained_on_are_replaced() -> None:
    form = chat_format(TURNS % TEMPLATES["kimi_k2"])
    _, message, first, second = form.messages(conversation(CALLS))
    assert [call["id"] for call in message["tool_calls"]] == ["functions.weather:0", "functions.now:1"]
    assert (first["tool_call_id"], second["tool_call_id"]) == ("functions.weather:0", "functions.now:1")


def test_results_go_under_the_role_that_the_template_shows() -> None:
    source = (
        "{{ tools | tojson }}在调用上述函数时{% for m in messages if m.role in ['user', 'assistant', 'observation'] %}"
        "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    messages = chat_format(source).messages(conversation(CALLS[:1]), USE)
    assert [message["role"] for message in messages] == ["user", "assistant", "observation"]
    assert messages[1]["content"].startswith("weather\n{")


def test_a_format_without_a_parser_is_refused_by_name() -> None:
    strange = chat_format(TURNS % (EACH % "]<]minimax[>[<tool_call>{{ c.function.arguments | tojson }}"))
    with pytest.raises(BadRequest, match="MiniMax-M3's format is not supported") as refusal:
        strange.messages([{"role": "user", "content": "Go"}], USE)
    assert "--tool-call-parser" in refusal.value.hint
    assert strange.messages([{"role": "user", "content": "Go"}], ToolParams(USE.tools, "required")), "forced: no format"


def test_reasoning_is_given_to_templates_under_their_names() -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    [message] = chat_format("{{ messages }}").messages([thought])
    assert message["reasoning"] == message["thinking"] == "Hm."


def test_every_name_of_a_tool_parser_is_one() -> None:
    assert all(formats.load(name) in formats.FORMATS.values() for name in formats.NAMES)
    assert formats.load("glm47") is formats.load("glm45")
