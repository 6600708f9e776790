"""Custom tools, whose input is free text. A model is shown a function with one string."""

from typing import Any

import msgspec
from msgspec import Struct


class CustomGrammar(Struct):
    syntax: str = ""
    definition: str = ""


class CustomFormat(Struct, kw_only=True):
    """Responses have the grammar's fields here, chats one level below."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None
    grammar: CustomGrammar | None = None


class CustomDefinition(Struct, kw_only=True):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


class _Arguments(Struct):
    input: str


_decoder = msgspec.json.Decoder(_Arguments)


def custom_function(tool: CustomDefinition) -> dict[str, Any]:
    """The grammar is described to the model; it does not constrain the input."""
    described = [tool.description or "", _grammar(tool.format)]
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    text = "\n\n".join(part for part in described if part)
    return {"type": "function", "function": {"name": tool.name, "description": text, "parameters": parameters}}


def _grammar(given: CustomFormat | None) -> str:
    grammar = given and (given.grammar or given)
    if grammar is None or not grammar.definition:
        return ""
    return f"The input follows this {grammar.syntax or ''} grammar:\n{grammar.definition}"


def custom_arguments(text: str) -> dict[str, str]:
    """The arguments of a call whose input is `text`."""
    return {"input": text}


def custom_input(arguments: str) -> str:
    """The input of a call. Arguments that are not as asked for, or cut short, are the input themselves."""
    try:
        return _decoder.decode(arguments).input
    except (msgspec.DecodeError, RecursionError):
        return arguments
