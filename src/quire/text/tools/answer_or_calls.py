"""Structured output beside tools: the completion is tool calls, as the model writes them, or it follows the schema."""

import json
from dataclasses import replace
from typing import Any

from quire.core.structured import Structured


def structured_answer_or_calls(answer: Structured, begins: tuple[str, ...]) -> Structured:
    """`begins` are the texts that open calls. What follows one of them is free."""
    calls = [
        {"type": "sequence", "elements": [{"type": "const_string", "value": begin}, {"type": "any_tokens"}]}
        for begin in begins
    ]
    return replace(
        answer,
        kind="structural_tag",
        text=json.dumps({"format": {"type": "or", "elements": [_format(answer), *calls]}}),
    )


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
