"""Objects are closed where nothing is lost by it."""

from quire.text.closed_schema import closed


def test_objects_are_closed_wherever_they_are() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    shut = {**inner, "additionalProperties": False}
    assert closed(inner) == shut
    assert closed({"properties": {"a": inner}, "required": ["a"]})["properties"]["a"] == shut
    assert closed({"type": "array", "items": inner}) == {"type": "array", "items": shut}
    assert closed({"anyOf": [inner, {"type": "null"}]}) == {"anyOf": [shut, {"type": "null"}]}
    assert closed({"$ref": "#/$defs/X", "$defs": {"X": inner}}) == {"$ref": "#/$defs/X", "$defs": {"X": shut}}
    assert closed({"additionalProperties": inner}) == {"additionalProperties": shut}


def test_what_was_decided_or_is_put_together_stays() -> None:
    named = {"properties": {"a": True}}
    for schema in (
        True,
        {"type": "object"},
        {**named, "additionalProperties": True},
        {**named, "patternProperties": {"x": True}},
        {**named, "anyOf": [{"required": ["a"]}]},
        {"allOf": [named, {"properties": {"b": True}}]},
    ):
        assert closed(schema) == schema
