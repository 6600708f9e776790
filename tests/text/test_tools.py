"""Tool parsers: their output does not depend on how the text is cut into pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import BadRequest
from quire.text import tools
from quire.text.chat.chat_format import chat_format
from quire.text.tools.forced_calls import NamedCallParser
from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.params import ToolParams
from quire.text.tools.parser import CallDelta, ToolParser
from trials import LENGTH

Parsed = tuple[str, list[tuple[str, str]]]  # content, and (name, arguments) of each call


def parse(parser: ToolParser, pieces: list[str]) -> Parsed:
    content, calls = "", []
    for output in [*map(parser.push, pieces), parser.flush()]:
        content += output.content
        for delta in output.calls:
            assert bool(delta.name) == (delta.index == len(calls)), "only the first delta of a call has the name"
            if delta.name:
                calls.append([delta.name, ""])
            calls[delta.index][1] += delta.arguments
    return content, [(name, arguments) for name, arguments in calls]


CASES = {
    "hermes": [
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}\n</tool_call>',
            "",
            [("f", {"a": [1, {"b": "}"}]})],
        ),
        (
            'Let me see.\n\n<tool_call>{"arguments": {"x": "\\"q\\""}, "name": "g"}</tool_call>\n',
            "Let me see.",
            [("g", {"x": '"q"'})],
        ),
        ('<tool_call>[{"name": "f", "arguments": {}}, {"name": "g"}]</tool_call>', "", [("f", {}), ("g", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call> ok', " ok", [("f", {"a": 1})]),
        (
            '<tool_call>{"name": "f", "id": 7, "arguments": null}</tool_call>'
            '<tool_call>{"name": "g", "arguments": {"b": 2}}',
            "",
            [("f", {}), ("g", {"b": 2})],
        ),
        ("a < b and <tool_calls> are text", "a < b and <tool_calls> are text", []),
        ("<tool_call>none</tool_call> here", "<tool_call>none</tool_call> here", []),
        ('<tool_call>{"city": "Paris"}</tool_call>', '<tool_call>{"city": "Paris"}</tool_call>', []),
        ("  \n ends with space \n", "  \n ends with space \n", []),
        ("half <tool_", "half <tool_", []),
    ],
    "llama3_json": [
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
        (
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
        ("The name is {}", "The name is {}", []),
        ('{"answer": 4} is JSON', '{"answer": 4} is JSON', []),
    ],
    "mistral": [
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
            "",
            [("f", {"a": 1}), ("g", {})],
        ),
        ('Yes. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": [2]}', "Yes.", [("f", {"a": 1}), ("g", {"b": [2]})]),
        ("[TOOL] no", "[TOOL] no", []),
    ],
    "granite": [('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})])],
    "phi4": [('functools[{"name": "f", "arguments": {"a": 1}}]', "", [("f", {"a": 1})])],
    "pythonic": [
        ('[f(a=1, b="x"), pkg.g(c=[True, None])]', "", [("f", {"a": 1, "b": "x"}), ("pkg.g", {"c": [True, None]})]),
        ("[1, 2] is a list", "[1, 2] is a list", []),
        ("[f(open('x'))]", "[f(open('x'))]", []),
        ("[f(a=open('x'))]", "[f(a=open('x'))]", []),
        ("Hello [f()]", "Hello [f()]", []),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=f>\n<parameter=a>\n3\n</parameter>\n"
            "<parameter=b>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>",
            "",
            [("f", {"a": 3, "b": "two\nlines"})],
        ),
        ("Hm <tool_call><function=g></function></tool_call> done", "Hm done", [("g", {})]),
    ],
}


def test_every_format_has_a_case() -> None:
    assert CASES.keys() == tools.FORMATS.keys()


@pytest.mark.parametrize("name", tools.FORMATS)
def test_calls_are_parsed_however_the_text_is_cut(name: str) -> None:
    tool_format = tools.load(name)
    for text, content, calls in CASES[name]:
        whole = parse(tool_format.parser(), [text])
        assert whole[0] == content, text
        assert [(call, json.loads(arguments)) for call, arguments in whole[1]] == calls, text
        assert parse(tool_format.parser(), list(text)) == whole, text
        for at in range(1, len(text)):
            assert parse(tool_format.parser(), [text[:at], text[at:]]) == whole, (text, at)


MARKERS = "[TOOL_CALLS]", "<function=a>", "<parameter=b>", "</parameter>", "<|tool_call|>", "functools", "</tool_call>"
PIECES = st.sampled_from([*MARKERS, "<tool_call>", '"name"', '"arguments"', '"f"', "null", *'{}:,[]x1\\"; \n'])


@pytest.mark.trial
@settings(max_examples=150 * LENGTH, deadline=None)
@given(st.lists(PIECES, max_size=24), st.sampled_from([*tools.FORMATS, "json"]))
def test_nonsense_is_parsed_the_same_however_it_is_cut(pieces: list[str], name: str) -> None:
    parser = JsonToolParser if name == "json" else tools.load(name).parser
    text = "".join(pieces)
    whole = parse(parser(), [text])
    assert parse(parser(), pieces) == whole
    assert parse(parser(), list(text)) == whole
    if not whole[1]:
        assert whole[0] == text, "where there is no call, nothing is lost"


def test_a_call_is_streamed_before_it_is_complete() -> None:
    parser = tools.load("hermes").parser()
    assert parser.push('<tool_call>{"name": "f').calls == []
    assert parser.push('", "arguments": {"ci').calls == [CallDelta(0, "f"), CallDelta(0, "", '{"ci')]
    assert parser.push('ty": "Par').calls == [CallDelta(0, "", 'ty": "Par')]


TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "$defs": {"X": {"type": "integer"}}}},
    },
    {"type": "function", "function": {"name": "g"}},
]


def test_forced_calls_are_structured_output() -> None:
    one = ToolParams(TOOLS, "named", "f")
    assert one.structured() and json.loads(one.structured().text) == TOOLS[0]["function"]["parameters"]
    assert parse(one.parser(tools.load("hermes")), ['{"a"', ": 1}"]) == ("", [("f", '{"a": 1}')])
    many = ToolParams(TOOLS, "required", parallel=False)
    schema = json.loads(many.structured().text)
    assert schema["maxItems"] == 1 and schema["$defs"] == {"X": {"type": "integer"}}
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [{"const": "f"}, {"const": "g"}]
    answer = '[{"name": "f", "arguments": {"a": 1}}]'
    assert parse(many.parser(tools.load("hermes")), list(answer)) == ("", [("f", '{"a": 1}')])
    assert NamedCallParser("f").flush().calls == []


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(BadRequest, match="the tools are f, g"):
        ToolParams(TOOLS, "named", "h")
    with pytest.raises(BadRequest, match="no tools"):
        ToolParams([], "required")
    with pytest.raises(BadRequest, match="same name"):
        ToolParams([TOOLS[0], TOOLS[0]])


def test_the_template_shows_the_tool_format() -> None:
    def of(template: str) -> object:
        return chat_format(template).tools

    assert of("{{ messages }}") is tools.load("hermes")
    assert of("{% if tools %}<tool_call>{% endif %}") is tools.load("hermes")
    assert of("{% if tools %}[TOOL_CALLS]{% endif %}") is tools.load("mistral")
    assert of("{% if tools %}<tool_call><function=x>{% endif %}") is tools.load("qwen3_coder")
    strange = chat_format("{% if tools %}call(){% endif %}")
    with pytest.raises(BadRequest, match="--tool-call-parser"):
        strange.messages([{"role": "user", "content": "x"}], ToolParams(TOOLS))
    assert chat_format("{% if tools %}call(){% endif %}", "pythonic").tools is tools.load("pythonic")


def test_tools_are_described_in_the_prompt_of_a_template_without_tools() -> None:
    chat = chat_format("{{ messages }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "two", "tool_call_id": "2"},
    ]
    rewritten = chat.messages(messages, ToolParams(TOOLS))
    assert [message["role"] for message in rewritten] == ["system", "user", "assistant", "user"]
    assert rewritten[0]["content"].startswith("Be short.\n\n") and '"name": "g"' in rewritten[0]["content"]
    assert parse(chat.tools.parser(), [rewritten[2]["content"]])[1] == [("f", '{"a": 1}')] * 2
    assert rewritten[3]["content"].count("<tool_response>") == 2
    assert chat.messages(messages[1:2], ToolParams(TOOLS))[0]["role"] == "system"
    assert chat.messages(messages[1:2], ToolParams(TOOLS, "none")) == messages[1:2]
    assert chat.template_tools(ToolParams(TOOLS)) is None
