"""Rewrites a JSON schema into one that llguidance can enforce. An instance of the result is valid by the original, and
a keyword that cannot be enforced stays, so that llguidance refuses it by name.

- `oneOf` becomes `anyOf` where no instance is valid by two of its schemas.
- A format that llguidance does not know becomes a pattern where a standard has one, and is else an annotation, as it is
  by the standard."""

from typing import Any

from quire.text.grammar.closed_objects import MAP_KEYWORDS, MAX_DEPTH, SCHEMA_KEYWORDS, is_too_deep
from quire.text.grammar.disjoint_schemas import SchemaBranch, all_disjoint

_KNOWN_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "uuid", "uri", "ipv4", "ipv6"}
)
_POINTER = "(/([^~/]|~[01])*)*"
_URI = r"([A-Za-z0-9\-._~!$&'()*+,;=:@/?\[\]]|%[0-9A-Fa-f]{2})*"  # the characters that RFC 3986 has
_IRI = _URI.replace("[A-Z", r"[\u00a0-\ud7ff\uf900-\ufffdA-Z")  # RFC 3987: and those beyond ASCII
_FORMAT_PATTERNS = {
    "uri-reference": f"^{_URI}(#{_URI})?$",
    "uri-template": rf"^({_URI[:-1]}|#|\{{[^{{}}\s]+\}})*$",
    "iri": f"^[A-Za-z][A-Za-z0-9+.-]*:{_IRI}(#{_IRI})?$",
    "iri-reference": f"^{_IRI}(#{_IRI})?$",
    "idn-email": r"^[^@\s]+@[^@\s]+$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
_HTTP_DRAFTS = tuple(f"json-schema.org/draft-{number}/schema" for number in ("04", "06", "07"))
_HTTPS_DRAFTS = tuple(f"json-schema.org/draft/{date}/schema" for date in ("2019-09", "2020-12"))


def narrow_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError for a schema nested deeper than MAX_DEPTH."""
    if is_too_deep(schema):
        raise ValueError(f"the schema is nested deeper than {MAX_DEPTH}")
    result: dict[str, Any] = _SchemaNarrower(schema).narrow(schema)
    draft = _draft_uri(result.pop("$schema", None))
    return {"$schema": draft, **result} if draft else result


def _draft_uri(name: object) -> str | None:
    """The draft of a schema as llguidance spells it; None for an unknown one."""
    bare = name.rstrip("#").removeprefix("https://").removeprefix("http://") if isinstance(name, str) else ""
    if bare in _HTTP_DRAFTS:
        return f"http://{bare}#"
    return f"https://{bare}" if bare in _HTTPS_DRAFTS else None


class _SchemaNarrower:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root

    def narrow(self, schema: Any) -> Any:
        if isinstance(schema, list):
            return [self.narrow(each) for each in schema]
        if not isinstance(schema, dict):
            return schema
        result = dict(schema)
        if schema is not self._root:
            result.pop("$schema", None)
        self._replace_one_of(result)
        for keyword in MAP_KEYWORDS:
            if isinstance(inner := result.get(keyword), dict):
                result[keyword] = {name: self.narrow(value) for name, value in inner.items()}
        for keyword in SCHEMA_KEYWORDS:
            if keyword in result and not (keyword == "oneOf" and "oneOf" in schema):  # a oneOf that stays is untouched
                result[keyword] = self.narrow(result[keyword])
        if isinstance(format := result.get("format"), str) and format not in _KNOWN_FORMATS:
            del result["format"]
            if format in _FORMAT_PATTERNS:
                result.setdefault("pattern", _FORMAT_PATTERNS[format])
        return result

    def _replace_one_of(self, schema: dict[str, Any]) -> None:
        """Turn `oneOf` into an equivalent `anyOf` if there is one."""
        alternatives = schema.get("oneOf")
        if not isinstance(alternatives, list) or "anyOf" in schema:
            return
        branches = [SchemaBranch(self._root, alternative) for alternative in alternatives]
        if all_disjoint(branches):
            del schema["oneOf"]
            schema["anyOf"] = [branch.enforced_schema for branch in branches]
