"""A structured output as source text for llguidance."""

import json
from typing import Any

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.text.grammar.schema_narrowing import narrow_schema

# White space between JSON tokens is allowed, as in vLLM by default, but no more than 40 characters in a row: small
# models can repeat it forever.
JSON_OPTIONS: Any = {
    "whitespace_pattern": r"[ \n\r\t]{0,40}",
    "coerce_one_of": False,
    "lenient": False,  # an unsupported keyword is an error
}
ANY_OBJECT = '{"type": "object"}'


def grammar_source(structured: Structured) -> str:
    """Raises BadRequest for mistakes that show without compiling."""
    from llguidance import LLMatcher

    try:
        match structured.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(ANY_OBJECT, overrides=JSON_OPTIONS)
            case "json_schema":
                schema = _parse_json(structured.text, "schema")
                if schema is False:
                    raise ValueError("nothing is valid by the schema `false`")
                if schema is not True and not isinstance(schema, dict):
                    raise ValueError("a schema is an object, `true` or `false`")
                schema = {} if schema is True else narrow_schema(schema)
                return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_OPTIONS)
            case "regex":
                return LLMatcher.grammar_from_lark(f"start: /{_lark_regex(structured.text)}/")
            case "choice":
                return LLMatcher.grammar_from_lark(_lark_choice(structured.text))
            case "grammar":
                return LLMatcher.grammar_from_lark(_lark_grammar(structured.text))
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(structured, str(error)) from None


def invalid_grammar(structured: Structured, why: str) -> BadRequest:
    if why.startswith("oneOf"):
        why = "`oneOf` is supported where its schemas exclude each other by type, by value or by required properties"
    lines = [line.strip() for line in why.split("\n")]
    why = next((line for line in lines if line.startswith("error:")), lines[0])  # the others are internals
    return BadRequest(
        f"the {structured.kind} cannot be used for structured output: {why[:300]}",
        "docs/structured.md lists what is supported",
        param="structured",
    )


def _parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the {what} is not JSON: {error}") from None


def _lark_regex(regex: str) -> str:
    """The regex has to match the whole text. \\d, \\w and their complements are restricted to ASCII, as in JavaScript
    and in JSON schemas."""
    from llguidance._lib import regex_to_lark

    return regex_to_lark(regex, "dw")


def _lark_choice(text: str) -> str:
    """One terminal for all choices: with a rule for each, thousands of choices take a second to compile."""
    choices = _parse_json(text, "list of choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices are a list of texts")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


def _lark_grammar(text: str) -> str:
    """Converts GBNF and EBNF, with `root ::=`, into Lark, which has `start:`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # the converter has no class of its own for mistakes in the grammar
        raise ValueError(str(error)) from None
