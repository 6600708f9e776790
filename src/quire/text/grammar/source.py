"""A language, as llguidance wants it written."""

import json
from typing import Any

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.text.grammar.schema_narrowing import narrow_schema

# JSON may have spaces and line breaks between its parts, as vLLM allows by default; but never more than so many in a
# row, because small models can go on with them for ever.
JSON_STYLE: Any = {
    "whitespace_pattern": r"[ \n\r\t]{0,40}",
    "coerce_one_of": False,
    "lenient": False,  # what cannot be held is refused
}
ANY_OBJECT = '{"type": "object"}'


def grammar_source(structured: Structured) -> str:
    """Raises BadRequest for what can be seen to be wrong without compiling it."""
    from llguidance import LLMatcher

    try:
        match structured.kind:
            case "json":
                return LLMatcher.grammar_from_json_schema(ANY_OBJECT, overrides=JSON_STYLE)
            case "json_schema":
                schema = _parse(structured.text, "schema")
                if schema is False:
                    raise ValueError("nothing is valid by the schema `false`")
                if schema is not True and not isinstance(schema, dict):
                    raise ValueError("a schema is an object, `true` or `false`")
                schema = {} if schema is True else narrow_schema(schema)
                return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=JSON_STYLE)
            case "regex":
                return LLMatcher.grammar_from_lark(f"start: /{_lark_expression(structured.text)}/")
            case "choice":
                return LLMatcher.grammar_from_lark(_one_of(structured.text))
            case "grammar":
                return LLMatcher.grammar_from_lark(_lark(structured.text))
    except (ValueError, RecursionError) as error:
        raise invalid_grammar(structured, str(error)) from None


def invalid_grammar(structured: Structured, why: str) -> BadRequest:
    if why.startswith("oneOf"):
        why = "`oneOf` is supported where its schemas exclude each other by type, by value or by required properties"
    lines = [line.strip() for line in why.split("\n")]
    why = next((line for line in lines if line.startswith("error:")), lines[0])  # the rest is its insides
    return BadRequest(
        f"the {structured.kind} of the answer cannot be used: {why[:300]}",
        "docs/structured.md lists what is supported",
        param="structured",
    )


def _parse(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"the {what} is not JSON: {error}") from None


def _lark_expression(regex: str) -> str:
    """The whole answer has to match. \\d, \\w and their opposites are about ASCII, as in JavaScript and in JSON
    schemas."""
    from llguidance._lib import regex_to_lark

    return regex_to_lark(regex, "dw")


def _one_of(text: str) -> str:
    """As one word of the grammar: with a rule for each, thousands of choices would take a second."""
    choices = _parse(text, "list of choices")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("choices are a list of texts")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


def _lark(text: str) -> str:
    """GBNF and EBNF, with `root ::=`, are turned into Lark, which has `start:`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:  # it has no class of its own for mistakes in the grammar
        raise ValueError(str(error)) from None
