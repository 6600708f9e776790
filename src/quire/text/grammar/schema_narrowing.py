"""Rewrites a JSON schema into one that llguidance can enforce. An instance of the result is valid by the original, and
a keyword that cannot be enforced stays, so that llguidance refuses it by name.

- An object that lists properties and does not mention others gets no others. JSON Schema allows any, and a model that
  does not know better writes them until its tokens are used up. A schema that is composed of several (`allOf`, or
  alternatives beside properties) stays open: closed, the parts would exclude each other.
- `oneOf` becomes `anyOf` where no instance is valid by two of its schemas.
- A format that no standard names is dropped. Some standard formats are replaced by a stricter one."""

from typing import Any

from quire.text.grammar.disjoint_schemas import SchemaBranch, all_disjoint

_OPENNESS_KEYWORDS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_OBJECT_KEYWORDS = frozenset({"properties", "required", "minProperties", "maxProperties"}) | _OPENNESS_KEYWORDS
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")
# Keywords whose subschemas may be narrowed. `not`, `if` and `contains` may not: there, narrower means wider.
_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_KEYWORDS = ("items", "prefixItems", "anyOf", "oneOf", "allOf", "additionalProperties", "additionalItems")

_POINTER = "(/([^~/]|~[01])*)*"
_FORMATS: dict[str, dict[str, Any]] = {
    **{
        name: {"format": name} for name in ("date-time", "time", "date", "duration", "email", "hostname", "uuid", "uri")
    },
    **{name: {"format": name} for name in ("ipv4", "ipv6", "regex")},  # llguidance refuses the last
    **{name: {"format": "uri"} for name in ("uri-reference", "iri", "iri-reference", "uri-template")},
    "idn-email": {"format": "email"},
    "idn-hostname": {"format": "hostname"},
    "json-pointer": {"pattern": f"^{_POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(0|[1-9][0-9]*)(#|{_POINTER})$"},
}
_HTTP_DRAFTS = tuple(f"json-schema.org/draft-{number}/schema" for number in ("04", "06", "07"))
_HTTPS_DRAFTS = tuple(f"json-schema.org/draft/{date}/schema" for date in ("2019-09", "2020-12"))

MAX_DEPTH = 128


def narrow_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for a schema nested deeper than MAX_DEPTH."""
    _check_depth(schema, MAX_DEPTH)
    result: dict[str, Any] = _SchemaNarrower(schema).narrow(schema)
    draft = _draft_uri(result.pop("$schema", None))
    return {"$schema": draft, **result} if draft else result


def _draft_uri(name: object) -> str | None:
    """As llguidance spells it; None for an unknown draft."""
    bare = name.rstrip("#").removeprefix("https://").removeprefix("http://") if isinstance(name, str) else ""
    if bare in _HTTP_DRAFTS:
        return f"http://{bare}#"
    return f"https://{bare}" if bare in _HTTPS_DRAFTS else None


def _check_depth(schema: Any, levels_left: int) -> None:
    if not levels_left:
        raise ValueError(f"the schema is nested deeper than {MAX_DEPTH}")
    if isinstance(schema, dict | list):
        for inner in schema.values() if isinstance(schema, dict) else schema:
            _check_depth(inner, levels_left - 1)


class _SchemaNarrower:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._closes_objects = not _is_composed(root)

    def narrow(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.narrow(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        result = dict(schema)
        if schema is not self._root:
            result.pop("$schema", None)
        self._replace_one_of(result)
        for keyword in _MAP_KEYWORDS:
            if isinstance(inner := result.get(keyword), dict):
                result[keyword] = {name: self.narrow(value) for name, value in inner.items()}
        for keyword in _SCHEMA_KEYWORDS:
            if keyword in result and not (keyword == "oneOf" and "oneOf" in schema):  # a oneOf that stays is untouched
                result[keyword] = self.narrow(result[keyword])
        if self._can_close(result):
            result["additionalProperties"] = False
        if isinstance(format := result.get("format"), str):
            del result["format"]
            stricter = _FORMATS.get(format, {})
            result |= stricter if "pattern" not in stricter.keys() & result.keys() else {"format": format}
        return result

    def _can_close(self, schema: dict[str, Any]) -> bool:
        has_properties = isinstance(schema.get("properties"), dict)
        return self._closes_objects and has_properties and not _OPENNESS_KEYWORDS & schema.keys()

    def _replace_one_of(self, schema: dict[str, Any]) -> None:
        """Turn `oneOf` into an equivalent `anyOf` if there is one."""
        alternatives = schema.get("oneOf")
        if not isinstance(alternatives, list) or "anyOf" in schema:
            return
        branches = [SchemaBranch(self._root, alternative, self._can_close) for alternative in alternatives]
        if all_disjoint(branches):
            del schema["oneOf"]
            schema["anyOf"] = [branch.enforced_schema for branch in branches]


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
