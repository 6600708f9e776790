"""Objects that end: schemas that say nothing of other properties than those they name, and are held to allow none.

By the letter such an object may have any others, and a model at a loss writes them until its tokens are over. OpenAI's
strict mode demands that schemas be closed, and clients leave it to the service otherwise. What is valid by the closed
schema is valid by the open one."""

from typing import Any

_DECIDED = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties"})
_OTHERS = frozenset({"$ref", "anyOf", "oneOf", "if", "not", "dependentSchemas"})  # may allow more beside `properties`
_MAPS = ("properties", "$defs", "definitions")
_SCHEMAS = ("items", "prefixItems", "anyOf", "oneOf", "additionalProperties")


def closed(schema: Any) -> Any:
    """Unchanged where parts of it are put together with `allOf`: closed, they would exclude each other."""
    return schema if _has_all_of(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    for name in _MAPS:
        if isinstance(inner := made.get(name), dict):
            made[name] = {key: _closed(value) for key, value in inner.items()}
    for name in _SCHEMAS:
        if name in made:
            made[name] = _closed(made[name])
    if isinstance(made.get("properties"), dict) and not (_DECIDED | _OTHERS) & made.keys():
        made["additionalProperties"] = False
    return made


def _has_all_of(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_all_of, schema))
    return isinstance(schema, dict) and ("allOf" in schema or any(map(_has_all_of, schema.values())))
