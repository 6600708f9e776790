"""A structured output as source text for llguidance."""

import json
from collections.abc import Mapping
from typing import Any

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.text.grammar.json_schema import explain, headline, json_schema_source
from quire.text.grammar.lark import grammar_to_lark, regex_to_lark
from quire.text.grammar.structural_tag import structural_tag_to_lark

ANY_OBJECT = {"type": "object"}


def grammar_source(structured: Structured, special_ids: Mapping[str, int] | None = None) -> str:
    """Raises BadRequest for mistakes that show without compiling. `special_ids`: the tokenizer's special tokens."""
    from llguidance import LLMatcher

    special_ids = special_ids or {}
    try:
        match structured.kind:
            case "json":
                return json_schema_source(ANY_OBJECT, structured)
            case "json_schema":
                return json_schema_source(_parse_json(structured.text, "schema"), structured)
            case "regex":
                return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(structured.text)}/")
            case "choice":
                return LLMatcher.grammar_from_lark(_lark_choice(structured.text))
            case "grammar":
                return LLMatcher.grammar_from_lark(grammar_to_lark(structured.text, special_ids))
            case "structural_tag":
                tag = _parse_json(structured.text, "structural tag")
                return LLMatcher.grammar_from_lark(structural_tag_to_lark(tag, structured, special_ids))
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(structured, str(error)) from None


def refusal(structured: Structured, error: str) -> BadRequest:
    """Why llguidance does not compile it."""
    return invalid_grammar(structured, explain(structured, error) if structured.kind == "json_schema" else error)


def invalid_grammar(structured: Structured, why: str) -> BadRequest:
    return BadRequest(
        f"the {structured.kind} cannot be used for structured output: {headline(why)[:300]}",
        "docs/structured.md lists what is supported",
        param="structured",
    )


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the {what} is not JSON: {error}") from None


def _lark_choice(text: str) -> str:
    """One terminal for all choices: with a rule for each, thousands of choices take a second to compile."""
    choices = _parse_json(text, "list of choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices are a list of texts")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)
