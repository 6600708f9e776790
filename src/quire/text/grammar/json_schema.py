"""A JSON schema as llguidance takes it, and why it does not take one."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

from quire.core.structured import Structured
from quire.text.grammar.closed_objects import MAP_KEYWORDS, SCHEMA_KEYWORDS, close_objects
from quire.text.grammar.schema_narrowing import narrow_schema

# As in llama.cpp: a space, or one or two line breaks and an indentation. Small models repeat white space for as long as
# they may.
DEFAULT_WHITESPACE = r" |\n{1,2}[ \t]{0,20}"
MAX_LOCATE_SECONDS = 0.1  # of CPU time, to find which part of a schema is refused

_UNSATISFIABLE = "Unsatisfiable schema: "


def json_schema_source(schema: Any, structured: Structured) -> str:
    """A grammar for llguidance. Raises ValueError."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        json.dumps(enforced_schema(schema, structured)), overrides=options(structured)
    )


def options(structured: Structured) -> Any:
    pattern = structured.whitespace_pattern
    pattern = DEFAULT_WHITESPACE if pattern is None else pattern.replace(r"\s", r"[ \n\r\t]")
    return {
        **({"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}),
        "coerce_one_of": False,
        "lenient": False,  # an unsupported keyword is an error
        "json_allow_general_unicode_escapes": True,
    }


def enforced_schema(schema: Any, structured: Structured) -> dict[str, Any]:
    """What llguidance enforces: the schema as it was sent, or narrower. Raises ValueError."""
    if schema is False:
        raise ValueError("nothing is valid by the schema `false`")
    if schema is not True and not isinstance(schema, dict):
        raise ValueError("a schema is an object, `true` or `false`")
    schema = {} if schema is True else schema
    return narrow_schema(close_objects(schema) if structured.disable_additional_properties else schema)


def explain(structured: Structured, error: str) -> str:
    """llguidance's error, with the path of the subschema that it is about."""
    schema = enforced_schema(json.loads(structured.text), structured)
    path, error = _locate(schema, structured, headline(error))
    where = f" at `#{path}`" if path else ""
    if keys := re.match(r"Unimplemented keys: (\[.*\])", error):
        names = [f"`{name}`" for name in json.loads(keys[1])]
        return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not supported{where}"
    if error.startswith("oneOf"):
        return f"`oneOf`{where} is supported where its schemas exclude each other by type, value or required properties"
    if error.startswith(_UNSATISFIABLE):
        return f"nothing is valid by the schema{where}: {error.removeprefix(_UNSATISFIABLE)}"
    return error + where


def headline(error: str) -> str:
    """The line of an error that is not about internals."""
    lines = [line.strip() for line in error.split("\n")]
    return next((line for line in lines if line.startswith("error:")), lines[0])


def _locate(root: dict[str, Any], structured: Structured, error: str) -> tuple[str, str]:
    """The path of the innermost subschema that is the cause, and its own error; the root if it takes too long."""
    deadline = time.thread_time() + MAX_LOCATE_SECONDS
    definitions: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    path, schema = "", root
    while True:
        for name, inner in _subschemas(schema):
            if time.thread_time() > deadline:
                return path, error
            found = _error_of({**definitions, **inner}, structured)
            if found == error or _makes_unsatisfiable(name, found, error):
                path, schema, error = f"{path}/{name}", inner, found
                break
        else:
            return path, error


def _makes_unsatisfiable(name: str, found: str, error: str) -> bool:
    """Whether the error of a subschema is why the schema around it has its own."""
    if not (found.startswith(_UNSATISFIABLE) and error.startswith(_UNSATISFIABLE)):
        return False
    if required := re.search(r"required property '(.*)' is unsatisfiable", error):
        return name == f"properties/{_escape(required[1])}"
    return not name.startswith(("properties/", "$defs/", "definitions/"))


def _error_of(schema: dict[str, Any], structured: Structured) -> str:
    from llguidance import LLMatcher

    source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options(structured))
    return headline(LLMatcher.validate_grammar(source))


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for keyword in MAP_KEYWORDS:
        if isinstance(inner := schema.get(keyword), dict):
            yield from ((f"{keyword}/{_escape(name)}", each) for name, each in inner.items() if isinstance(each, dict))
    for keyword in SCHEMA_KEYWORDS:
        inner = schema.get(keyword)
        if isinstance(inner, dict):
            yield keyword, inner
        elif isinstance(inner, list):
            yield from ((f"{keyword}/{index}", each) for index, each in enumerate(inner) if isinstance(each, dict))


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
