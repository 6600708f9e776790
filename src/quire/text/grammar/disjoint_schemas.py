"""Whether schemas exclude each other, where types, values or properties show it."""

from collections.abc import Sequence
from typing import Any

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_OBJECT_KEYWORDS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_MAX_DEPTH = 6  # of nested properties and of references


class SchemaBranch:
    """One alternative of a `oneOf`: as the schema declares it, and as it will be enforced."""

    def __init__(self, root: dict[str, Any], schema: Any) -> None:
        self._root, self._schema = root, schema
        self._added: dict[str, Any] = {}  # enforced in addition to the schema
        self.declared = self.enforced = resolved = _resolve(root, schema)
        if resolved is None:
            return
        if "type" not in resolved and not {"const", "enum"} & resolved.keys() and _OBJECT_KEYWORDS & resolved.keys():
            self._added["type"] = "object"
        self.enforced = {**resolved, **self._added}

    @property
    def enforced_schema(self) -> Any:
        return {"allOf": [self._schema, self._added]} if self._added else self._schema

    def excludes(self, other: "SchemaBranch") -> bool:
        """No instance enforced here is valid by the other one as declared. Narrows this branch where that helps."""
        return _disjoint(self._root, self.enforced, other.declared, _MAX_DEPTH) or self._forbid_property_of(other)

    def _forbid_property_of(self, other: "SchemaBranch") -> bool:
        """Forbid a property that the other branch requires and this one does not."""
        if self.enforced is None or other.declared is None:
            return False
        if _types(self.enforced) & _types(other.declared) != {"object"}:
            return False
        names = sorted(_required(other.declared) - _required(self.enforced))
        if not names:
            return False
        self._added.setdefault("properties", {})[names[0]] = False
        self._added["additionalProperties"] = True
        self.enforced = {**self.enforced, "properties": {**_properties(self.enforced), names[0]: False}}
        return True


def all_disjoint(branches: Sequence[SchemaBranch]) -> bool:
    return all(one is other or one.excludes(other) for one in branches for other in branches)


def _resolve(root: dict[str, Any], schema: Any) -> dict[str, Any] | None:
    """The schema, or the one that it refers to; None if it cannot be resolved. Keywords beside a reference are ignored,
    which only makes the result wider."""
    for _ in range(_MAX_DEPTH):
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            return None
        if "$ref" not in schema:
            return schema
        schema = _follow_pointer(root, schema["$ref"])
    return None


def _follow_pointer(root: Any, pointer: Any) -> Any:
    if not isinstance(pointer, str) or not pointer.startswith("#") or "%" in pointer:
        return None
    schema = root
    for step in pointer[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, dict) or step not in schema:
            return None
        schema = schema[step]
        if isinstance(schema, dict) and ("$id" in schema or "id" in schema) and schema is not root:
            return None  # an id changes the base of references inside
    return schema


def _disjoint(root: dict[str, Any], a: dict[str, Any] | None, b: dict[str, Any] | None, depth: int) -> bool:
    if a is None or b is None or not depth:
        return False
    common = _types(a) & _types(b)
    if not common:
        return True
    values_a, values_b = _values(a), _values(b)
    if values_a is not None and values_b is not None:
        return not any(value in values_b for value in values_a)
    if common != {"object"}:
        return False
    return any(_requires_what_is_forbidden(*pair) for pair in ((a, b), (b, a))) or any(
        _disjoint(root, _resolve(root, x), _resolve(root, y), depth - 1) for x, y in _common_properties(a, b)
    )


def _requires_what_is_forbidden(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """`a` requires a property that `b` does not allow."""
    if any(_properties(b).get(name) is False for name in _required(a)):
        return True
    if b.get("additionalProperties") is not False or "patternProperties" in b:
        return False
    return any(name not in _properties(b) for name in _required(a))


def _common_properties(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The schemas of the properties that both describe and at least one requires."""
    names = (_required(a) | _required(b)) & _properties(a).keys() & _properties(b).keys()
    return [(_properties(a)[name], _properties(b)[name]) for name in names]


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: dict[str, Any]) -> set[str]:
    required = schema.get("required")
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    types = {name for name in names if isinstance(name, str)}
    if not types:
        values = _values(schema)
        types = {_type_of(value) for value in values} if values is not None else set(_TYPES)
    return types | ({"integer"} if "number" in types else set())


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]
