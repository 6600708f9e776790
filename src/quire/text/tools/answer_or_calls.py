"""Structured output beside tools: the completion is tool calls, as the model writes them, or it follows the schema."""

import json
from dataclasses import replace
from typing import Any

from quire.core.structured import Structured
from quire.text.tools.forced_calls import structured_required_calls
from quire.text.tools.parser import ToolFormat


def structured_answer_or_calls(
    answer: Structured, tool_format: ToolFormat, tools: list[dict[str, Any]], parallel: bool
) -> Structured:
    """`tool_format` has markers that open calls. Calls in JSON follow the schemas of the tools; others are free."""
    calls = [_calls(begin, tool_format.json_end, tools, parallel) for begin in tool_format.begins]
    tag = {"format": {"type": "or", "elements": [_format(answer), *calls]}}
    return replace(answer, kind="structural_tag", text=json.dumps(tag))


def _calls(begin: str, json_end: str | None, tools: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    if json_end is None:
        return {"type": "sequence", "elements": [{"type": "const_string", "value": begin}, {"type": "any_tokens"}]}
    schema = json.loads(structured_required_calls(tools, parallel).text)
    if not json_end:
        return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": ""}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    call = {"type": "json_schema", "json_schema": {**schema["items"], **definitions}}
    tag = {"type": "tag", "begin": f"{begin}\n", "content": call, "end": f"\n{json_end}"}
    once = {"at_least_one": True, "stop_after_first": not parallel}
    return {"type": "tags_with_separator", "tags": [tag], "separator": "\n", **once}


def _format(answer: Structured) -> Any:
    """The answer as a format of a structural tag."""
    match answer.kind:
        case "json":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(answer.text)}
        case "regex":
            return {"type": "regex", "pattern": answer.text}
        case "choice":
            texts = json.loads(answer.text)
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
        case "grammar":
            return {"type": "grammar", "grammar": answer.text}
        case "structural_tag":
            tag = json.loads(answer.text)
            return tag.get("format", {**tag, "type": "structural_tag"}) if isinstance(tag, dict) else tag
