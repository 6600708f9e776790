"""Closes the objects of a JSON schema: they get only the properties that it names.

By the letter it may have others, too. OpenAI's `strict` and vLLM's `disable_additional_properties` ask for this."""

from typing import Any

OPENNESS_KEYWORDS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_OBJECT_KEYWORDS = frozenset({"properties", "required", "minProperties", "maxProperties"}) | OPENNESS_KEYWORDS
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")
# Keywords with subschemas that may be made narrower. `not`, `if` and `contains` may not: there, narrower means wider.
MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
SCHEMA_KEYWORDS = ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties", "additionalItems")
MAX_DEPTH = 128  # of a schema


def close_objects(schema: Any) -> Any:
    """A schema whose objects' properties are spread over several schemas (`allOf`, or alternatives beside properties)
    stays as it is: closed, the parts would exclude each other. So does one that is too deep, which is refused later."""
    return schema if is_too_deep(schema) or _is_composed(schema) else _closed(schema)


def is_too_deep(schema: Any, levels_left: int = MAX_DEPTH) -> bool:
    if not levels_left or not isinstance(schema, dict | list):
        return not levels_left
    return any(
        is_too_deep(inner, levels_left - 1) for inner in (schema.values() if isinstance(schema, dict) else schema)
    )


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for keyword in MAP_KEYWORDS:
        if isinstance(inner := result.get(keyword), dict):
            result[keyword] = {name: _closed(value) for name, value in inner.items()}
    for keyword in SCHEMA_KEYWORDS:
        if keyword in result:
            result[keyword] = _closed(result[keyword])
    if isinstance(properties := result.get("properties"), dict) and not OPENNESS_KEYWORDS & result.keys():
        required = result.get("required")
        named = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        result["properties"] = {**properties, **{name: True for name in named if name not in properties}}
        result["additionalProperties"] = False
    return result


def _is_composed(schema: Any) -> bool:
    """Whether an object's properties are spread over several schemas."""
    if isinstance(schema, list):
        return any(map(_is_composed, schema))
    if not isinstance(schema, dict):
        return False
    alternatives = any(keyword in schema for keyword in _ALTERNATIVES)
    return (
        "allOf" in schema
        or bool(alternatives and _OBJECT_KEYWORDS & schema.keys())
        or any(map(_is_composed, schema.values()))
    )
