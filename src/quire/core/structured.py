"""Structured output: a constraint on the text of a completion."""

import json as json_format
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quire.core.errors import BadRequest
from quire.core.structured_defaults import StructuredDefaults, whitespace

StructuredKind = Literal["json", "json_schema", "regex", "choice", "grammar", "structural_tag"]

MAX_CHOICES = 20_000
MAX_CHARACTERS = 256 * 1024  # of a schema, regex, grammar or list of choices; more takes too long to compile


@dataclass(frozen=True, slots=True)
class Structured:
    """Only tokens that the constraint allows are sampled. The completion ends where the constraint lets it end."""

    kind: StructuredKind  # json: any JSON object
    text: str = ""  # the schema as JSON, the regex, the choices as a JSON list, or the grammar in GBNF or Lark
    whitespace_pattern: str | None = None  # a regex, between the elements of JSON; empty: none; None: the default
    disable_additional_properties: bool | None = None  # objects have only the properties that the schema names

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARACTERS:
            raise BadRequest(
                f"the {self.kind} of the structured output has {len(self.text)} characters, "
                f"and {MAX_CHARACTERS} are allowed",
                "use a simpler one",
                param="structured",
            )

    @property
    def is_plain_json(self) -> bool:
        """Any JSON object, with the usual white space."""
        return self.kind == "json" and self.whitespace_pattern is None

    def with_defaults(self, defaults: StructuredDefaults) -> "Structured":
        """With what the request does not say."""
        closed, pattern = self.disable_additional_properties, self.whitespace_pattern
        return replace(
            self,
            whitespace_pattern=defaults.whitespace_pattern if pattern is None else pattern,
            disable_additional_properties=defaults.disable_additional_properties if closed is None else closed,
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
        structural_tag: str | Mapping[str, Any] | None = None,
        whitespace_pattern: str | None = None,
        disable_any_whitespace: bool | None = None,
        disable_additional_properties: bool | None = None,
    ) -> "Structured | None":
        """From vLLM's fields: a JSON schema (as text or as an object), any JSON object, a regex, a list of texts, a
        grammar, or a structural tag; and how JSON is written. None if no kind is given; more than one is refused."""
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
        if structural_tag is not None:
            text = structural_tag if isinstance(structural_tag, str) else json_format.dumps(structural_tag)
            given["structural_tag"] = cls("structural_tag", text)
        if len(given) > 1:
            raise BadRequest(
                f"{' and '.join(given)} are given, and structured output takes one of them",
                "give one",
                param=[*given][1],
            )
        structured = next(iter(given.values()), None)
        return structured and replace(
            structured,
            whitespace_pattern=whitespace(whitespace_pattern, disable_any_whitespace),
            disable_additional_properties=disable_additional_properties,
        )
