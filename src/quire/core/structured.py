"""The language an answer has to be in."""

from dataclasses import dataclass
from typing import Literal

StructuredKind = Literal["json", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Structured:
    """Only tokens that keep the answer inside this language are drawn, and it ends where the language lets it."""

    kind: StructuredKind
    text: str = ""  # the schema as JSON, the expression, the choices as a JSON list, or the grammar as EBNF
