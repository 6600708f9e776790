"""A JSON schema as it is followed: what is valid by the result is valid by the schema, and what cannot be held is left
in it, to be refused by name.

- An object that names properties and says nothing of others has no others. By the letter it may have any, and a model
  at a loss writes them until its tokens are over. Nothing is closed in a schema whose parts are put together from
  several (`allOf`, or alternatives beside properties): closed, they would exclude each other.
- `oneOf` is `anyOf` where nothing can be valid by two of its schemas.
- A format that no standard names is a remark. Some that a standard names are held by a narrower one."""

from typing import Any

from quire.text.grammar.disjoint_schemas import SchemaBranch, all_disjoint

_DECIDED = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_OF_OBJECTS = frozenset({"properties", "required", "minProperties", "maxProperties"}) | _DECIDED
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties", "additionalItems")
# what these hold may be narrowed: `not`, `if` and `contains` turn it round

_POINTER = "(/([^~/]|~[01])*)*"
_FORMATS: dict[str, dict[str, Any]] = {
    **{
        name: {"format": name} for name in ("date-time", "time", "date", "duration", "email", "hostname", "uuid", "uri")
    },
    **{name: {"format": name} for name in ("ipv4", "ipv6", "regex")},  # the last is refused
    **{name: {"format": "uri"} for name in ("uri-reference", "iri", "iri-reference", "uri-template")},
    "idn-email": {"format": "email"},
    "idn-hostname": {"format": "hostname"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(0|[1-9][0-9]*)(#|{_POINTER})$"},
}
_DRAFTS = ("json-schema.org/draft-04/schema", "json-schema.org/draft-06/schema", "json-schema.org/draft-07/schema")
_NEW_DRAFTS = ("json-schema.org/draft/2019-09/schema", "json-schema.org/draft/2020-12/schema")

MAX_DEPTH = 128


def narrow_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError if it is nested too deeply."""
    _check_depth(schema, MAX_DEPTH)
    result: dict[str, Any] = _Narrowing(schema).of(schema)
    draft = _draft(result.pop("$schema", None))
    return {"$schema": draft, **result} if draft else result


def _draft(name: object) -> str | None:
    """As llguidance knows it; others are not known to anyone."""
    bare = name.rstrip("#").removeprefix("https://").removeprefix("http://") if isinstance(name, str) else ""
    if bare in _DRAFTS:
        return f"http://{bare}#"
    return f"https://{bare}" if bare in _NEW_DRAFTS else None


def _check_depth(schema: Any, left: int) -> None:
    if not left:
        raise ValueError(f"the schema is nested deeper than {MAX_DEPTH}")
    if isinstance(schema, dict | list):
        for inner in schema.values() if isinstance(schema, dict) else schema:
            _check_depth(inner, left - 1)


class _Narrowing:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._closes = not _put_together(root)

    def of(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.of(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        made = dict(schema)
        if schema is not self._root:
            made.pop("$schema", None)
        self._be_exclusive(made)
        for name in _MAPS:
            if isinstance(inner := made.get(name), dict):
                made[name] = {key: self.of(value) for key, value in inner.items()}
        for name in _SCHEMAS:
            if name in made and not (name == "oneOf" and "oneOf" in schema):  # not exclusive: held as it stands or not
                made[name] = self.of(made[name])
        if self._closable(made):
            made["additionalProperties"] = False
        if isinstance(format := made.get("format"), str):
            del made["format"]
            held = _FORMATS.get(format, {})
            made |= held if "pattern" not in held.keys() & made.keys() else {"format": format}
        return made

    def _closable(self, schema: dict[str, Any]) -> bool:
        return self._closes and isinstance(schema.get("properties"), dict) and not _DECIDED & schema.keys()

    def _be_exclusive(self, made: dict[str, Any]) -> None:
        """Make `oneOf` an `anyOf` if that is the same."""
        schemas = made.get("oneOf")
        if not isinstance(schemas, list) or "anyOf" in made:
            return
        branches = [SchemaBranch(self._root, schema, self._closable) for schema in schemas]
        if all_disjoint(branches):
            del made["oneOf"]
            made["anyOf"] = [branch.narrowed for branch in branches]


def _put_together(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_put_together, schema))
    if not isinstance(schema, dict):
        return False
    alternatives = any(name in schema for name in _ALTERNATIVES)
    return (
        "allOf" in schema
        or bool(alternatives and _OF_OBJECTS & schema.keys())
        or any(map(_put_together, schema.values()))
    )
