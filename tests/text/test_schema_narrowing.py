"""An instance that is valid by a narrowed schema is valid by the original."""

import itertools
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.text.grammar.schema_narrowing import narrow_schema


def valid(instance: Any, schema: Any) -> bool:
    return Draft202012Validator(schema).is_valid(instance)


def test_objects_are_closed_wherever_they_are() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    closed = {**inner, "additionalProperties": False}
    assert narrow_schema(inner) == closed
    assert narrow_schema({"properties": {"a": inner}, "required": ["a"]})["properties"]["a"] == closed
    assert narrow_schema({"type": "array", "items": inner}) == {"type": "array", "items": closed}
    assert narrow_schema({"anyOf": [inner, {"type": "null"}]}) == {"anyOf": [closed, {"type": "null"}]}
    assert narrow_schema({"$ref": "#/$defs/X", "$defs": {"X": inner}}) == {"$ref": "#/$defs/X", "$defs": {"X": closed}}
    assert narrow_schema({"additionalProperties": inner}) == {"additionalProperties": closed}


NAMED = {"properties": {"a": True}}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**NAMED, "additionalProperties": True},
        {**NAMED, "patternProperties": {"x": True}},
        {**NAMED, "anyOf": [{"required": ["a"]}]},
        {"allOf": [NAMED, {"properties": {"b": True}}]},
        {"properties": {"kind": True}, "anyOf": [NAMED, {"properties": {"b": True}}]},
        {"$ref": "#/$defs/base", "properties": {"b": True}, "$defs": {"base": NAMED}},
        {"not": NAMED},
        {"const": NAMED},
        {"default": {"format": "colour"}, "examples": [{"oneOf": [True]}]},
    ],
)
def test_objects_with_explicit_openness_or_composed_ones_stay_open(schema: dict[str, Any]) -> None:
    assert narrow_schema(schema) == schema


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
    assert narrow_schema({"format": "regex"}) == {"format": "regex"}  # llguidance refuses it
    assert narrow_schema({"format": "iri-reference"}) == {"format": "uri"}
    assert narrow_schema({"format": "json-pointer", "pattern": "x"}) == {"format": "json-pointer", "pattern": "x"}
    pointer = narrow_schema({"format": "json-pointer"})
    assert [valid(text, pointer) for text in ("", "/a/~1b", "a", "/~2")] == [True, True, False, False]


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
