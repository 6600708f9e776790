"""Structured output: a constraint on the text of a completion."""

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.core.errors import BadRequest

StructuredKind = Literal["json", "json_schema", "regex", "choice", "grammar"]

MAX_CHOICES = 20_000
MAX_CHARACTERS = 256 * 1024  # of a schema, regex, grammar or list of choices; more takes too long to compile


@dataclass(frozen=True, slots=True)
class Structured:
    """Only tokens that the constraint allows are sampled. The completion ends where the constraint lets it end."""

    kind: StructuredKind  # json: any JSON object
    text: str = ""  # the schema as JSON, the regex, the choices as a JSON list, or the grammar in GBNF or Lark

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARACTERS:
            raise BadRequest(
                f"the {self.kind} of the structured output has {len(self.text)} characters, "
                f"and {MAX_CHARACTERS} are allowed",
                "use a simpler one",
                param="structured",
            )

    @classmethod
    def one_of(cls, choices: Sequence[str], field: str = "choice") -> "Structured":
        if isinstance(choices, str) or not all(isinstance(text, str) for text in choices):
            raise BadRequest(f"{field} is not a list of texts", param=field)
        if not choices:
            raise BadRequest(f"{field} is empty: there is nothing to choose from", param=field)
        if len(choices) > MAX_CHOICES:
            raise BadRequest(f"{field} has {len(choices)} texts, and {MAX_CHOICES} are allowed", param=field)
        return cls("choice", json_format.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def of(
        cls,
        *,
        json: str | bool | Mapping[str, Any] | None = None,
        json_object: bool | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
    ) -> "Structured | None":
        """From vLLM's fields: a JSON schema (as text or as an object), any JSON object, a regex, a list of texts, or a
        grammar. None if no field is given; more than one is refused."""
        given: dict[str, Structured] = {}
        if json is not None:
            given["json"] = cls("json_schema", json if isinstance(json, str) else json_format.dumps(json))
        if json_object:
            given["json_object"] = cls("json")
        if regex is not None:
            given["regex"] = cls("regex", regex)
        if choice is not None:
            given["choice"] = cls.one_of(choice)
        if grammar is not None:
            given["grammar"] = cls("grammar", grammar)
        if len(given) > 1:
            raise BadRequest(
                f"{' and '.join(given)} are given, and structured output takes one of them",
                "give one",
                param=[*given][1],
            )
        return next(iter(given.values()), None)
