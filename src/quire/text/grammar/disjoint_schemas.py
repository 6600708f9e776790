"""Whether schemas exclude each other, where that can be seen: by types, by values, and by properties."""

from collections.abc import Callable, Sequence
from typing import Any

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties", "patternProperties"})
_DEPTH = 6  # of properties and references that are looked into


class SchemaBranch:
    """One of several alternatives: as it is meant, and as it is followed."""

    def __init__(self, root: dict[str, Any], schema: Any, closable: Callable[[dict[str, Any]], bool]) -> None:
        self._root, self._schema = root, schema
        self._added: dict[str, Any] = {}  # what is followed beside the schema
        self.meant = self.followed = view = _resolve(root, schema)
        if view is None:
            return
        if "type" not in view and not {"const", "enum"} & view.keys() and _OF_OBJECTS & view.keys():
            self._added["type"] = "object"
        closed = {"additionalProperties": False} if closable(view) else {}
        self.followed = {**view, **closed, **self._added}

    @property
    def narrowed(self) -> Any:
        """The schema to follow."""
        return {"allOf": [self._schema, self._added]} if self._added else self._schema

    def excludes(self, other: "SchemaBranch") -> bool:
        """Nothing that is followed here is valid there, as it is meant there."""
        return _apart(self._root, self.followed, other.meant, _DEPTH) or self._leave_out(other)

    def _leave_out(self, other: "SchemaBranch") -> bool:
        """Follow no instance with some property that the other one has to have."""
        if self.followed is None or other.meant is None or _types(self.followed) & _types(other.meant) != {"object"}:
            return False
        names = sorted(_required(other.meant) - _required(self.followed))
        if not names:
            return False
        self._added.setdefault("properties", {})[names[0]] = False
        self._added["additionalProperties"] = True
        self.followed = {**self.followed, "properties": {**_properties(self.followed), names[0]: False}}
        return True


def all_disjoint(branches: Sequence[SchemaBranch]) -> bool:
    return all(one is other or one.excludes(other) for one in branches for other in branches)


def _resolve(root: dict[str, Any], schema: Any) -> dict[str, Any] | None:
    """The schema itself or what it refers to; keywords beside a reference are left out, which makes it no narrower.
    None: not known."""
    for _ in range(_DEPTH):
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            return None
        if "$ref" not in schema:
            return schema
        schema = _at(root, schema["$ref"])
    return None


def _at(root: Any, pointer: Any) -> Any:
    if not isinstance(pointer, str) or not pointer.startswith("#") or "%" in pointer:
        return None
    place = root
    for step in pointer[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, dict) or step not in place:
            return None
        place = place[step]
        if isinstance(place, dict) and ("$id" in place or "id" in place) and place is not root:
            return None  # references inside mean something else
    return place


def _apart(root: dict[str, Any], a: dict[str, Any] | None, b: dict[str, Any] | None, depth: int) -> bool:
    if a is None or b is None or not depth:
        return False
    common = _types(a) & _types(b)
    if not common:
        return True
    ours, theirs = _values(a), _values(b)
    if ours is not None and theirs is not None:
        return not any(value in theirs for value in ours)
    if common != {"object"}:
        return False
    return any(_missing(*pair) for pair in ((a, b), (b, a))) or any(
        _apart(root, _resolve(root, x), _resolve(root, y), depth - 1) for x, y in _shared(a, b)
    )


def _missing(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """The first has to have a property that the other cannot."""
    if any(_properties(b).get(name) is False for name in _required(a)):
        return True
    if b.get("additionalProperties") is not False or "patternProperties" in b:
        return False
    return any(name not in _properties(b) for name in _required(a))


def _shared(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The schemas of properties that are always there and that both speak of."""
    names = (_required(a) | _required(b)) & _properties(a).keys() & _properties(b).keys()
    return [(_properties(a)[name], _properties(b)[name]) for name in names]


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _required(schema: dict[str, Any]) -> set[str]:
    found = schema.get("required")
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) else None


def _types(schema: dict[str, Any]) -> set[str]:
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    types = {name for name in names if isinstance(name, str)}
    if not types:
        values = _values(schema)
        types = {_type(value) for value in values} if values is not None else set(_TYPES)
    return types | ({"integer"} if "number" in types else set())


def _type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]
