"""Structural tags: free text in which tags open parts that follow a schema."""

import json
from typing import Any

import pytest

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tools.answer_or_calls import structured_answer_or_calls
from quire.text.tools.formats import load
from quire.text.tools.parser import ToolFormat

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CONTENT = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "tag", "begin": "<a>", "content": CONTENT, "end": "</a>"}
ANY_TAG = {"begin": "<b>", "content": {"type": "any_text"}, "end": "</b>"}
RECURSIVE = {"type": "grammar", "grammar": 'root ::= "x" root | "y"'}


def of(tag: dict[str, Any]) -> Structured:
    return Structured("structural_tag", json.dumps({"format": tag} if "type" in tag else tag))


PARAMETERS = {"type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"enum": ["Rome"]}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "time")]
FREE = ToolFormat(load("hermes").parser, (), begins=("<tool_call>", "<|im_start|>"))


def call_or(answer: Structured, tool_format: ToolFormat = FREE, parallel: bool = True) -> Structured:
    return structured_answer_or_calls(answer, tool_format, TOOLS, parallel)


HERMES = '<tool_call>\n{"name": "time", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLS = ["<tool_call>\n{}", "<|im_start|>f<|im_start|>"]
TAGS: dict[str, tuple[Structured, list[str], list[str]]] = {
    "structures": (
        of({"structures": [{"begin": "<f=g>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}),
        ["hi", 'hi <f=g>{"a": 1}</f> and <f=g>{"a": 2}</f>', "a < b"],
        ["hi <f=h>", 'hi <f=g>{"b"', 'hi <f=g>{"a": 1}'],
    ),
    "triggered": (
        of({"type": "triggered_tags", "triggers": ["<a>", "<b"], "tags": [TAG, ANY_TAG], "at_least_one": True}),
        ['hi <a>{"a": 1}</a>', "<b>x</b> y"],
        ["hi", "<b>x"],
    ),
    "triggered once": (
        of({"type": "triggered_tags", "triggers": ["<b>"], "tags": [ANY_TAG], "stop_after_first": True}),
        ["hi", "hi <b></b>"],
        ["<b></b>x"],
    ),
    "by a special token": (
        of({"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [{**TAG, "begin": "<|im_start|>"}]}),
        ["hi", 'hi <|im_start|>{"a": 1}</a>'],
        ["hi <|im_start|>x"],
    ),
    "with separators": (
        of({"type": "tags_with_separator", "tags": [TAG], "separator": ", "}),
        ["", '<a>{"a": 1}</a>', '<a>{"a": 1}</a>, <a>{"a": 2}</a>'],
        ["x", '<a>{"a": 1}</a>, '],
    ),
    "sequence": (
        of(
            {
                "type": "sequence",
                "elements": [ANY_TAG | {"type": "tag"}, RECURSIVE, {"type": "regex", "pattern": "/[0-9]"}],
            }
        ),
        ["<b>!</b>xxy/3"],
        ["<b>!</b>xx/3", "<b>!</b>y"],
    ),
    "a schema or calls": (call_or(Structured("json_schema", json.dumps(SCHEMA))), ['{"a": 1}', *CALLS], ["{}", "hi"]),
    "an object or calls": (call_or(Structured("json")), ['{"b": []}', *CALLS], ["[]"]),
    "a regex or calls": (call_or(Structured("regex", "[0-9]+")), ["12", *CALLS], ["a"]),
    "a choice or calls": (call_or(Structured.one_of(["yes", "no"])), ["no", *CALLS], ["maybe"]),
    "a grammar or calls": (call_or(Structured("grammar", RECURSIVE["grammar"])), ["xxy", *CALLS], ["xx"]),
    "calls in JSON": (
        call_or(Structured("json"), load("hermes")),
        ["{}", HERMES, f"{HERMES}\n{HERMES}"],
        [f"{HERMES}\n", f"{HERMES} It rains.", HERMES.replace("Rome", "Bonn"), HERMES.replace("time", "date")],
    ),
    "one call in JSON": (call_or(Structured("json"), load("hermes"), False), [HERMES], [f"{HERMES}\n{HERMES}"]),
    "a list of calls": (
        call_or(Structured("json"), load("phi4")),
        ['functools[{"name": "time", "arguments": {"city": "Rome"}}]'],
        ["functools[]", 'functools{"name": "time", "arguments": {}}'],
    ),
    "a tag or calls": (call_or(of(TAG)), ['<a>{"a": 1}</a>', *CALLS], ["<a>"]),
}


@pytest.mark.parametrize("name", TAGS)
def test_a_tag_opens_what_follows_its_format(grammars: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    structured, right, wrong = TAGS[name]
    for text in right + wrong:
        matcher, tokens = grammars.matcher(structured), tokenizer.encode(text, add_special_tokens=False)
        mask = matcher.mask() if matcher.advance(tokens) else b""
        assert bool(mask and any(mask[eos // 8] >> eos % 8 & 1 for eos in tokenizer.eos_ids)) == (text in right), text


DEEP: dict[str, Any] = {"type": "any_text"}
for _ in range(40):
    DEEP = {"type": "or", "elements": [DEEP]}


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        (5, "an object with a `format`"),
        ({}, "of type `structural_tag` is not a list"),
        ({"format": []}, "a format is an object"),
        ({"structures": 5}, "not a list"),
        ({"structures": [{"begin": 4}], "triggers": ["a"]}, "`begin` .* is not a text"),
        ({"structures": [{"begin": "b", "end": ""}], "triggers": ["a"]}, "begins with one of the triggers"),
        ({"format": {"type": "odd"}}, "of type `odd` is not supported"),
        ({"format": {"type": "or"}}, "`elements` of a format of type `or` is not a list"),
        ({"format": {**ANY_TAG, "type": "tag", "end": ""}}, "needs an `end`"),
        ({"format": {"type": "json_schema", "json_schema": {"uniqueItems": True}}}, "uniqueItems"),
        ({"format": DEEP}, "32 deep"),
    ],
)
def test_a_wrong_tag_is_refused(grammars: GrammarCompiler, tag: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        grammars.compile(Structured("structural_tag", json.dumps(tag)))
