"""Tool parsers: their output does not depend on how the text is cut into pieces."""

import json
import re
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import BadRequest
from quire.text.chat.chat_format import chat_format
from quire.text.grammar.source import grammar_source
from quire.text.tools import formats as tools
from quire.text.tools.forced_calls import NamedCallParser
from quire.text.tools.json_parser import JsonToolParser
from quire.text.tools.params import ToolParams
from quire.text.tools.parser import CallDelta, ToolParser
from text.tool_cases import CASES, SCHEMAS
from trials import rounds

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


def test_every_format_has_a_case() -> None:
    assert CASES.keys() == tools.FORMATS.keys()


@pytest.mark.parametrize("name", tools.FORMATS)
def test_calls_are_parsed_however_the_text_is_cut(name: str) -> None:
    tool_format = tools.load(name)
    for text, content, calls in CASES[name]:
        whole = parse(tool_format.parser(SCHEMAS), [text])
        assert whole[0] == content, text
        assert [(call, json.loads(arguments)) for call, arguments in whole[1]] == calls, text
        assert parse(tool_format.parser(SCHEMAS), list(text)) == whole, text
        for at in range(1, len(text)):
            assert parse(tool_format.parser(SCHEMAS), [text[:at], text[at:]]) == whole, (text, at)


MARKERS = "[TOOL_CALLS]", "<function=a>", "<parameter=b>", "</parameter>", "</function>", "functools", "</tool_call>"
ALL_MARKERS = {*MARKERS, *(marker for each in tools.FORMATS.values() for marker in each.begins)}
PIECES = st.sampled_from([*sorted(ALL_MARKERS), '"name"', '"arguments"', '"f"', "null", *'{}:,[]x1\\"; \n'])


@pytest.mark.trial
@settings(max_examples=rounds(150), deadline=None)
@given(st.lists(PIECES, max_size=24), st.sampled_from([*tools.FORMATS, "json"]))
def test_nonsense_is_parsed_the_same_however_it_is_cut(pieces: list[str], name: str) -> None:
    parser = JsonToolParser if name == "json" else partial(tools.load(name).parser, {})
    text = "".join(pieces)
    whole = parse(parser(), [text])
    assert parse(parser(), pieces) == whole
    assert parse(parser(), list(text)) == whole
    if not whole[1] and name != "openai":  # whose headers are not shown
        assert whole[0] == text, "where there is no call, nothing is lost"


def damaged(text: str, random: Random) -> str:
    """The text with some of its words, tags and characters left out, doubled or exchanged."""
    parts = re.findall(r"<[^<>]*>|\w+|\s|.", text, re.DOTALL)
    for _ in range(random.randint(0, 6)):
        at, other = random.randrange(len(parts)), random.choice(parts)
        parts[at : at + 1] = random.choice([[], [other], [parts[at], other], [parts[at]]]) or [""]
    return "".join(parts)


@pytest.mark.trial
@settings(max_examples=rounds(150), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(sorted(tools.FORMATS)))
def test_damaged_calls_are_parsed_the_same_however_they_are_cut(random: Random, name: str) -> None:
    text = damaged("\n".join(random.choice(CASES[name])[0] for _ in range(2)), random)
    whole = parse(tools.load(name).parser(SCHEMAS), [text])
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(8))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, None], strict=True)]
    assert parse(tools.load(name).parser(SCHEMAS), pieces) == whole
    assert parse(tools.load(name).parser(SCHEMAS), list(text)) == whole
    if not whole[1] and name != "openai":
        assert whole[0] == text, "where there is no call, nothing is lost"


def test_a_call_is_streamed_before_it_is_complete() -> None:
    parser = tools.load("hermes").parser({})
    assert parser.push('<tool_call>{"name": "f').calls == []
    assert parser.push('", "arguments": {"ci').calls == [CallDelta(0, "f"), CallDelta(0, "", '{"ci')]
    assert parser.push('ty": "Par').calls == [CallDelta(0, "", 'ty": "Par')]


def test_a_text_between_tags_is_streamed_before_it_is_complete() -> None:
    parser = tools.load("qwen3_coder").parser(SCHEMAS)
    assert parser.push("<tool_call>\n<function=f>\n").calls == [CallDelta(0, "f")]
    assert parser.push("<parameter=b>\nOne ").calls == [CallDelta(0, "", '{"b": "One ')]
    assert parser.push('"two"\n').calls == [CallDelta(0, "", '\\"two\\"')], "the newline may belong to the tags"
    assert parser.push("</param").calls == []
    assert parser.push("eter>\n<parameter=a>\n1").calls == [CallDelta(0, "", '", "a": ')]
    assert parser.push("2\n</parameter></function>").calls == [CallDelta(0, "", "12}")]


def test_a_call_without_a_name_is_none() -> None:
    for name, text in [
        ("functionary", "<function= >{}</function>"),
        ("openai", "<|channel|>commentary to=functions.<|message|>{}"),
    ]:
        assert parse(tools.load(name).parser({}), [text])[1] == [], name


def test_a_call_that_is_cut_off_keeps_what_was_written() -> None:
    for name, text, arguments in [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": "Par', '{"b": "Par'),
        ("qwen3_coder", "<tool_call><function=f><parameter=b>\nPar", '{"b": "Par'),
        ("glm45", "<tool_call>f<arg_key>b</arg_key><arg_value>Par", '{"b": "Par'),
        ("kimi_k2", '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"b": "Par', '{"b": "Par'),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"b": "Par', '{"b": "Par'),
    ]:
        assert parse(tools.load(name).parser(SCHEMAS), list(text)) == ("", [("f", arguments)]), name


@pytest.mark.parametrize(
    ("name", "text", "call_id"),
    [
        ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "abcdefghi"),
        ("kimi_k2", "<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>", "functions.f:7"),
        ("solar_open", "<|tool_call:begin|>a1b2<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>", "a1b2"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', ""),
    ],
)
def test_an_id_that_the_model_writes_is_the_id_of_the_call(name: str, text: str, call_id: str) -> None:
    assert tools.load(name).parser({}).push(text).calls[0].id == call_id


def tool(name: str, **schema: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


SAME_NAMES = [
    tool("a", **{"$defs": {"X": {"type": "integer"}}}, properties={"x": {"$ref": "#/$defs/X"}}, required=["x"]),
    tool("b", **{"$defs": {"X": {"type": "string"}}}, properties={"x": {"$ref": "#/$defs/X"}}, required=["x"]),
    tool(
        "c",
        **{"$id": "https://example.com/c"},
        properties={"v": {"type": "boolean"}, "w": {"$ref": "#/properties/v"}, "child": {"$ref": "#"}},
        required=["v"],
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "valid"),
    [
        ("a", {"x": 1}, True),
        ("a", {"x": "s"}, False),
        ("b", {"x": "s"}, True),
        ("b", {"x": 1}, False),
        ("c", {"v": True, "w": False, "child": {"v": True}}, True),
        ("c", {"v": True, "w": 1}, False),
        ("c", {"v": True, "child": {"w": True}}, False),
        ("c", {"v": True, "child": [{"name": "a", "arguments": {"x": 1}}]}, False),
    ],
)
def test_references_in_a_required_call_stay_within_their_tool(
    name: str, arguments: dict[str, object], valid: bool
) -> None:
    from llguidance import LLMatcher, LLTokenizer

    source = grammar_source(ToolParams(SAME_NAMES, "required").structured())
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0)
    ids = list(json.dumps([{"name": name, "arguments": arguments}]).encode())
    assert (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()) == valid, matcher.get_error()


def test_a_property_may_be_called_as_a_keyword_of_schemas_is() -> None:
    odd = tool("a", properties={"$ref": {"type": "string"}, "default": {"$ref": "#/properties/$ref"}})
    kept = tool("b", properties={"x": {"const": {"$ref": "#/y"}}})
    schema = json.loads(ToolParams([odd, kept], "required").structured().text)
    assert schema["$defs"]["0"]["properties"]["default"] == {"$ref": "#/$defs/0/properties/$ref"}
    closed = {**kept["function"]["parameters"], "additionalProperties": False}
    assert schema["items"]["anyOf"][1]["properties"]["arguments"] == closed


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
    assert schema["maxItems"] == 1 and "$defs" not in schema
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
    assert of("{% if tools %}<tool_call><function=x><parameter=y>{% endif %}") is tools.load("qwen3_coder")
    assert of("{% if tools %}<tool_call>{name}<arg_key>{% endif %}") is tools.load("glm45")
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
    assert parse(chat.tools.parser({}), [rewritten[2]["content"]])[1] == [("f", '{"a": 1}')] * 2
    assert rewritten[3]["content"].count("<tool_response>") == 2
    assert chat.messages(messages[1:2], ToolParams(TOOLS))[0]["role"] == "system"
    assert chat.messages(messages[1:2], ToolParams(TOOLS, "none")) == messages[1:2]
    assert chat.template_tools(ToolParams(TOOLS)) is None
