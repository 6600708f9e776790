"""The language an answer has to be in."""

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.core.errors import BadRequest

StructuredKind = Literal["json", "json_schema", "regex", "choice", "grammar"]

MAX_CHOICES = 20_000
MAX_TEXT = 256 * 1024  # characters; a schema of more takes longer to compile than anyone should wait for


@dataclass(frozen=True, slots=True)
class Structured:
    """Only tokens that keep the answer inside this language are drawn, and it ends where the language lets it."""

    kind: StructuredKind  # json: any JSON object
    text: str = ""  # the schema as JSON, the expression, the choices as a JSON list, or the grammar: GBNF or Lark

    def __post_init__(self) -> None:
        if len(self.text) > MAX_TEXT:
            raise BadRequest(
                f"the {self.kind} of the answer has {len(self.text)} characters, and {MAX_TEXT} are allowed",
                "ask for something simpler",
                param="structured",
            )

    @classmethod
    def one_of(cls, choices: Sequence[str], field: str = "choice") -> "Structured":
        if isinstance(choices, str) or not all(isinstance(text, str) for text in choices):
            raise BadRequest(f"{field} is not a list of texts", param=field)
        if not choices:
            raise BadRequest(f"{field} is empty: there is nothing to answer", param=field)
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
        """From vLLM's names: a JSON schema (as text or as an object), free JSON, an expression, a list of texts, or a
        grammar. None if none is given; giving two is a mistake."""
        found: dict[str, Structured] = {}
        if json is not None:
            found["json"] = cls("json_schema", json if isinstance(json, str) else json_format.dumps(json))
        if json_object:
            found["json_object"] = cls("json")
        if regex is not None:
            found["regex"] = cls("regex", regex)
        if choice is not None:
            found["choice"] = cls.one_of(choice)
        if grammar is not None:
            found["grammar"] = cls("grammar", grammar)
        if len(found) > 1:
            raise BadRequest(
                f"{' and '.join(found)} are given, and an answer is in one language", "give one", param=[*found][1]
            )
        return next(iter(found.values()), None)
