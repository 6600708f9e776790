"""Objects that get only the properties that their schema names."""

from typing import Any

import pytest

from quire.text.grammar.closed_objects import close_objects


def test_objects_are_closed_wherever_they_are() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    closed = {**inner, "additionalProperties": False}
    assert close_objects(inner) == closed
    assert close_objects({"properties": {"a": inner}, "required": ["a"]})["properties"]["a"] == closed
    assert close_objects({"type": "array", "items": inner}) == {"type": "array", "items": closed}
    assert close_objects({"anyOf": [inner, {"type": "null"}]}) == {"anyOf": [closed, {"type": "null"}]}
    assert close_objects({"$ref": "#/$defs/X", "$defs": {"X": inner}}) == {"$ref": "#/$defs/X", "$defs": {"X": closed}}
    assert close_objects({"additionalProperties": inner}) == {"additionalProperties": closed}
    assert close_objects({"oneOf": [inner]}) == {"oneOf": [closed]}


def test_a_required_property_that_is_not_declared_is_named_all_the_same() -> None:
    """Closed without it, the object could not be satisfied."""
    closed = close_objects({"properties": {"a": {"type": "null"}}, "required": ["a", "b", 3]})
    assert closed["properties"] == {"a": {"type": "null"}, "b": True} and closed["additionalProperties"] is False


NAMED = {"properties": {"a": True}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {**NAMED, "additionalProperties": True},
        {**NAMED, "patternProperties": {"x": True}},
        {**NAMED, "anyOf": [{"required": ["a"]}]},
        {"allOf": [NAMED, {"properties": {"b": True}}]},
        {"properties": {"kind": True}, "anyOf": [NAMED, {"properties": {"b": True}}]},
        {"$ref": "#/$defs/base", "properties": {"b": True}, "$defs": {"base": NAMED}},
        {"not": NAMED},
        {"const": NAMED},
        {"default": NAMED, "examples": [{"oneOf": [NAMED]}]},
    ],
)
def test_objects_with_explicit_openness_or_composed_ones_stay_open(schema: Any) -> None:
    assert close_objects(schema) == schema
