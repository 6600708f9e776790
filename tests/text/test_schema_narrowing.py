"""An instance that is valid by a narrowed schema is valid by the original."""

import itertools
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.text.grammar.schema_narrowing import narrow_schema


def valid(instance: Any, schema: Any) -> bool:
    return Draft202012Validator(schema).is_valid(instance)


VALUES = [None, True, 0, 1.5, "", "x", [], [1], {}]
OBJECTS = [
    {name: value for name, value in zip("abk", values, strict=True) if value != "none"}
    for values in itertools.product([1, "s", "none"], [1, "none"], ["x", "y", "none"])
]
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}
KIND_X = {"type": "object", "properties": {"k": {"const": "x"}, "a": True}, "required": ["k"]}
KIND_Y = {"type": "object", "properties": {"k": {"enum": ["y", "z"]}, "b": True}, "required": ["k"]}
EXCLUSIVE = {
    "types": [{"type": "string"}, {"type": ["integer", "null"]}, A | {"type": "object"}],
    "values": [{"const": "x"}, {"enum": [0, None]}, {"type": "array"}],
    "a tag": [KIND_X, KIND_Y],
    "a tag behind references": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
    "what each has to have": [{**A, "required": ["a"]}, {**B, "required": ["b"]}],
    "only required": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["k"]}],
    "one has to have what the closed other cannot": [
        {**A, "type": "object", "additionalProperties": False},
        {**B, "type": "object", "required": ["b"]},
    ],
    "types of a property": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    ],
}
SHARED = {
    "numbers": [{"type": "number"}, {"type": "integer"}],
    "values": [{"enum": ["x", "y"]}, {"const": "x"}],
    "anything": [True, {"type": "string"}],
    "optional properties": [A, B],
    "one is open": [{**A, "type": "object", "required": ["a"]}, {**B, "type": "object"}],
    "a reference elsewhere": [{"$ref": "https://example.com/x"}, {"type": "null"}],
    "a reference to itself": [{"$ref": "#"}, {"type": "null"}],
}
DEFS = {"x": KIND_X, "y": KIND_Y}


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_one_of_disjoint_schemas_becomes_any_of(name: str) -> None:
    schema = {"oneOf": EXCLUSIVE[name], "$defs": DEFS}
    result = narrow_schema(schema)
    assert "oneOf" not in result
    enforced = [instance for instance in VALUES + OBJECTS if valid(instance, result)]
    assert len(enforced) > 1
    assert [instance for instance in enforced if not valid(instance, schema)] == []


@pytest.mark.parametrize("name", SHARED)
def test_other_alternatives_stay(name: str) -> None:
    """Closed, or restricted to objects, they would look disjoint."""
    schema = {"oneOf": SHARED[name], "$defs": DEFS}
    assert narrow_schema(schema)["oneOf"] == SHARED[name]


def test_formats() -> None:
    assert narrow_schema({"type": "string", "format": "colour"}) == {"type": "string"}
    assert narrow_schema({"format": "date"}) == {"format": "date"}
    assert narrow_schema({"format": "regex"}) == {}
    assert narrow_schema({"format": "json-pointer", "pattern": "x"}) == {"pattern": "x"}


FORMATS = {
    "json-pointer": ({"", "/a/~1b"}, {"a", "/~2"}),
    "relative-json-pointer": ({"0", "1/a", "2#"}, {"", "/a", "-1"}),
    "uri-reference": ({"", "/a?b#c", "http://x/%20", "a:b", "//[::1]:80"}, {"a b", "ü", "%2", "#a#b", "<x>"}),
    "iri": ({"http://ü/"}, {"/ü", "http://a b"}),
    "iri-reference": ({"/ü", "http://ü/#é"}, {"a b"}),
    "uri-template": ({"http://x/{id}{?q*}"}, {"http://x/{", "a b", "{}"}),
    "idn-email": ({"ü@ö.de"}, {"ü", "a b@c"}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_that_llguidance_does_not_know_is_held_by_a_pattern(name: str) -> None:
    right, wrong = FORMATS[name]
    narrowed = narrow_schema({"format": name})
    assert {text for text in right | wrong if valid(text, narrowed)} == right


def test_unknown_drafts_are_dropped() -> None:
    assert narrow_schema({"$schema": "https://json-schema.org/draft-07/schema"}) == {
        "$schema": "http://json-schema.org/draft-07/schema#"
    }
    assert narrow_schema({"$schema": "http://example.com/mine", "items": {"$schema": "x"}}) == {"items": {}}


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(200):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="nested deeper than 128"):
        narrow_schema(schema)
