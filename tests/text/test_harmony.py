"""gpt-oss's channels: reasoning, content and calls, however the text is cut."""

from typing import Any

import pytest

from quire.text.chat.chat_format import chat_format
from quire.text.chat.chat_template import ChatTemplate
from quire.text.harmony import HarmonyParser
from quire.text.tools.params import ToolParams

Parts = tuple[str, str, list[tuple[str, str]]]

HEAD = "<|start|>assistant"
ANALYSIS = "<|channel|>analysis<|message|>Rain?<|end|>"

CASES: list[tuple[str, Parts]] = [
    (f"{ANALYSIS}{HEAD}<|channel|>final<|message|>It rains.", ("Rain?", "It rains.", [])),
    (f"{ANALYSIS}{HEAD}{ANALYSIS}{HEAD}<|channel|>final<|message|>Yes.", ("Rain?\nRain?", "Yes.", [])),
    (
        f'{ANALYSIS}{HEAD}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}',
        ("Rain?", "", [("f", '{"a": 1}')]),
    ),
    (
        f"<|channel|>commentary<|message|>I look.<|end|>{HEAD} to=functions.f<|channel|>commentary json<|message|>{{}}"
        f"<|call|>{HEAD} to=functions.g<|channel|>commentary json<|message|><|call|>",
        ("", "I look.", [("f", "{}"), ("g", "{}")]),
    ),
    (" to=functions.f<|channel|>commentary<|message|>{}", ("", "", [("f", "{}")])),
    (
        f'{ANALYSIS}{HEAD} to=functions.f<|channel|>commentary <|constrain|>json<|message|>{{"a": 1}}<|call|>',
        ("Rain?", "", [("f", '{"a": 1}')]),
    ),
    ("<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>", ("", "", [("f", "{}")])),
    (f"{ANALYSIS}{HEAD}<|channel|>final <|constrain|>json<|message|>[1]<|return|>", ("Rain?", "[1]", [])),
    ("<|channel|>analysis<|message|>cut o", ("cut o", "", [])),
    ("<|channel|>ana", ("", "", [])),
    ("No channels <here>.", ("", "No channels <here>.", [])),
]


def parse(parser: HarmonyParser, pieces: list[str]) -> Parts:
    gains = [*map(parser.push, pieces), parser.push("", ended=True)]
    calls: list[tuple[str, str]] = []
    for delta in (call for gain in gains for call in gain.calls):
        if delta.name:
            calls.append((delta.name, ""))
        calls[delta.index] = calls[delta.index][0], calls[delta.index][1] + delta.arguments
    return "".join(g.reasoning for g in gains), "".join(g.content for g in gains), calls


@pytest.mark.parametrize(("text", "parts"), CASES)
def test_channels_are_split_however_the_text_is_cut(text: str, parts: Parts) -> None:
    assert parse(HarmonyParser(calls=True), [text]) == parts
    assert parse(HarmonyParser(calls=True), list(text)) == parts
    for at in range(1, len(text)):
        assert parse(HarmonyParser(calls=True), [text[:at], text[at:]]) == parts


def test_without_tools_what_is_written_to_one_is_content() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}"
    assert parse(HarmonyParser(calls=False), [text]) == ("", "{}", [])


def test_one_call_where_calls_are_not_parallel() -> None:
    text = CASES[3][0]
    assert parse(HarmonyParser(calls=True, parallel=False), list(text))[2] == [("f", "{}")]


def test_a_template_with_channels_is_harmony() -> None:
    template = "{{ messages }}{{ tools }}<|channel|>final<|message|><|channel|>commentary"
    form, use = chat_format(template), ToolParams([{"type": "function", "function": {"name": "f"}}])
    assert isinstance(form.reader(), HarmonyParser) and isinstance(form.reader(use), HarmonyParser)
    assert form.reader(thinks=False) is None, "structured output has no channels"
    forced = form.reader(ToolParams(use.tools, "named", "f"), thinks=False)
    assert forced is not None and forced.push("{}").calls[0].name == "f"


PUBLISHED = (  # the parts of gpt-oss's template that show tools, calls and results
    "{% for tool in tools or [] %}{{ '// ' + tool.function.description + '\\n' }}type {{ tool.function.name }}"
    "{% endfor %}"
    "{% set last = namespace(name=none) %}{% for message in messages %}"
    "{% if message.role == 'assistant' and 'tool_calls' in message %}{% set call = message.tool_calls[0].function %}"
    "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if message.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}"
    "{% endif %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments|tojson }}<|call|>{% set last.name = call.name %}"
    "{% elif message.role == 'tool' %}<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content|tojson }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def render(messages: list[dict[str, Any]], *tools: dict[str, Any]) -> str:
    form, use = chat_format(PUBLISHED), ToolParams([{"type": "function", "function": tool} for tool in tools])
    return ChatTemplate(PUBLISHED).render(
        form.messages(messages, use), tools=form.template_tools(use), add_generation_prompt=True
    )


def test_a_tool_without_a_description_is_not_refused() -> None:
    """The published template joins the description to a text, and fails where there is none."""
    asked = [{"role": "user", "content": "Rain?"}]
    assert render(asked, {"name": "f"}).startswith("// \ntype f<|start|>user")
    assert render(asked, {"name": "f", "description": "What it does."}).startswith("// What it does.\ntype f")


def test_each_of_several_calls_is_followed_by_its_own_result() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": {"of": name}}} for name in ("f", "g")
    ]
    told = render(
        [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "g", "content": "of g"},
            {"role": "tool", "tool_call_id": "f", "content": "of f"},
        ],
        {"name": "f"},
    )
    assert (
        told.partition("<|message|>I look.<|end|>")[2]
        == "".join(
            f'<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{"of": "{name}"}}<|call|>'
            f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"of {name}"<|end|>'
            for name in ("f", "g")
        )
        + "<|start|>assistant"
    )
