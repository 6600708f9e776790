"""Forced tool calls: the completion is JSON alone, constrained by the schemas of the tools."""

import json
from typing import Any

from quire.core.structured import Structured
from quire.text.grammar.closed_objects import close_objects
from quire.text.tools.parser import CallDelta, ToolParserOutput


class NamedCallParser:
    """The completion is the arguments of the function that the client has named."""

    def __init__(self, name: str) -> None:
        self._name: str = name

    def push(self, text: str) -> ToolParserOutput:
        if not text:
            return ToolParserOutput()
        name, self._name = self._name, ""
        return ToolParserOutput(calls=[CallDelta(0, name, text)])

    def flush(self) -> ToolParserOutput:
        return ToolParserOutput()


def structured_named_call(tool: dict[str, Any]) -> Structured:
    return Structured("json_schema", json.dumps(_parameters(tool)))


def structured_required_calls(tools: list[dict[str, Any]], parallel: bool) -> Structured:
    """A list of one call; of one or more with `parallel`."""
    calls = []
    definitions: dict[str, Any] = {}
    for index, tool in enumerate(tools):
        parameters = _parameters(tool)
        scope = f"#/$defs/{index}"
        scoped = _with_scope(parameters, scope)
        if scoped != parameters:  # references start at the root, so the schema that they refer to stands there
            scoped.pop("$id", None)  # a schema with an id would be another root
            definitions[str(index)], scoped = scoped, {"$ref": scope}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": scoped},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return Structured("json_schema", json.dumps(schema))


_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})  # their values are no schemas
_MAP_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def _with_scope(schema: Any, scope: str, is_map: bool = False) -> Any:
    """The schema with references to its root turned into references to `scope`. `is_map`: its keys are names."""
    if isinstance(schema, list):
        return [_with_scope(each, scope) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if is_map:
            result[key] = _with_scope(value, scope)
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            result[key] = scope + value[1:]
        else:
            result[key] = value if key in _DATA_KEYWORDS else _with_scope(value, scope, key in _MAP_KEYWORDS)
    return result


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Closed: a function takes the parameters that it names, and small models make up others."""
    return dict(close_objects(tool["function"].get("parameters") or {"type": "object", "properties": {}}))
