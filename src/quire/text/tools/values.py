"""Values that a model writes as bare text: the tool's schema says whether `3` is a number or a text."""

import ast
import json
from typing import Any

_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}
ONLY_TEXT = frozenset({"string"})

_MAX_DEPTH = 8  # of references and alternatives
_MAX_LITERAL = 1 << 16  # characters; bounds the time of Python's parser


def property_types(schema: Any, key: str) -> frozenset[str] | None:
    """The JSON types that a property may have; None: any."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return _types(properties.get(key), schema, _MAX_DEPTH) if isinstance(properties, dict) else None


def json_value(text: str, types: frozenset[str] | None) -> str:
    """The text as JSON of one of these types, else as a string."""
    if types != ONLY_TEXT:
        bare = text.strip()
        for candidate in (bare, _PYTHON.get(bare, bare), _python_literal(bare, types)):
            if candidate is not None and _fits(candidate, types):
                return candidate
    return json.dumps(text, ensure_ascii=False)


def _fits(text: str, types: frozenset[str] | None) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    kind = _type_of(value)
    return types is None or kind in types or (kind == "integer" and "number" in types)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _type_of(value: Any) -> str:
    return "array" if isinstance(value, list) else _TYPES.get(type(value), "object")


def _python_literal(text: str, types: frozenset[str] | None) -> str | None:
    """A list or dict with single quotes, as JSON."""
    if types is None or not types & {"object", "array"} or text[:1] not in ("{", "[") or len(text) > _MAX_LITERAL:
        return None
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def _types(schema: Any, root: Any, depth: int) -> frozenset[str] | None:
    if not isinstance(schema, dict) or not depth:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_follow(root, reference), root, depth - 1)
    if isinstance(given := schema.get("type"), str | list):
        return frozenset([given] if isinstance(given, str) else filter(lambda each: isinstance(each, str), given))
    if "const" in schema:
        return frozenset({_type_of(schema["const"])})
    if isinstance(values := schema.get("enum"), list):
        return frozenset(map(_type_of, values))
    for keyword in ("anyOf", "oneOf"):
        if isinstance(alternatives := schema.get(keyword), list):
            known = [_types(each, root, depth - 1) for each in alternatives]
            return None if None in known else frozenset[str]().union(*(each for each in known if each is not None))
    if isinstance(parts := schema.get("allOf"), list):
        return next((types for part in parts if (types := _types(part, root, depth - 1)) is not None), None)
    return None


def _follow(root: Any, reference: str) -> Any:
    place = root
    for name in reference.removeprefix("#").split("/")[1:]:
        place = place.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place if reference.startswith("#") else None
