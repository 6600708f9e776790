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
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        parameters = _parameters(tool)
        for key in ("$defs", "definitions"):  # references start at the root, so the definitions move there
            definitions.setdefault(key, {}).update(parameters.pop(key, {}))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["function"]["name"]}, "arguments": parameters},
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
    schema.update({key: schemas for key, schemas in definitions.items() if schemas})
    return Structured("json_schema", json.dumps(schema))


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    """Closed: a function takes the parameters that it names, and small models make up others."""
    return dict(close_objects(tool["function"].get("parameters") or {"type": "object", "properties": {}}))
