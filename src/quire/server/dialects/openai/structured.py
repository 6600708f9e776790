"""The fields of structured output: OpenAI's `response_format`, and vLLM's."""

import json
from dataclasses import replace
from typing import Any, Protocol

from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.core.structured_defaults import whitespace

Schema = dict[str, Any] | bool  # JSON schema knows `true` and `false`


class JsonSchema(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None  # objects have only the properties that are named


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    json_schema: JsonSchema | None = None
    schema: Schema | None = None  # llama.cpp's, beside the type json_object; it closes objects
    format: dict[str, Any] | None = None  # of a structural tag, as are the next two
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    value: str | Schema | None = None  # Text Generation Inference's: a schema or a regex


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's. Exactly one of the first six is given."""

    json: str | Schema | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # without effect: there is one backend


class StructuredOutputFields(Protocol):
    """A body with the fields of structured output."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: str | Schema | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None
    guided_whitespace_pattern: str | None


def structured_output(body: StructuredOutputFields) -> Structured | None:
    """None: any text."""
    asked: dict[str, Structured] = {}
    if body.response_format is not None and (output := _of_response_format(body.response_format)):
        asked["response_format"] = output
    if (outputs := body.structured_outputs) is not None:
        named = {f"structured_outputs.{name}": getattr(outputs, name) for name in _KINDS}
        asked |= {name: _of(name, value) for name, value in named.items() if value is not None and value is not False}
    named = {f"guided_{name}": getattr(body, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
    asked |= {name: _of(name, value) for name, value in named.items() if value is not None}
    if len(asked) > 1:
        first, second = sorted(asked)[:2]
        raise BadRequest(f"{first} and {second} are both given", "give one of them", param=second)
    structured = next(iter(asked.values()), None)
    return None if structured is None else _with_options(structured, body)


def _with_options(structured: Structured, body: StructuredOutputFields) -> Structured:
    """With the options of how JSON is written."""
    outputs = body.structured_outputs or StructuredOutputs()
    pattern = whitespace(outputs.whitespace_pattern, outputs.disable_any_whitespace)
    if body.guided_whitespace_pattern is not None:
        pattern = whitespace(body.guided_whitespace_pattern, False, "guided_whitespace_pattern")
    closed = structured.disable_additional_properties or outputs.disable_additional_properties
    return replace(structured, whitespace_pattern=pattern, disable_additional_properties=closed)


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def _of(name: str, value: Any) -> Structured:
    kind = name.rpartition(".")[2].removeprefix("guided_")
    if kind == "json_object":
        return Structured("json")
    if kind == "json":
        return schema_output(value, name)
    if kind == "choice":
        return Structured.one_of(value, name)
    if kind == "structural_tag":
        return Structured("structural_tag", _dumps(_loads(value, name) if isinstance(value, str) else value, name))
    if not value:
        raise BadRequest(f"{name} is empty", param=name)
    return Structured("regex" if kind == "regex" else "grammar", value)


def schema_output(schema: str | Schema, where: str, strict: bool | None = None) -> Structured:
    """With `strict`, objects have only the properties that the schema names."""
    if isinstance(schema, str):  # as text, as in vLLM
        schema = _loads(schema, where)
        if not isinstance(schema, dict | bool):
            raise BadRequest(f"{where} is not a JSON schema", "give an object", param=where)
    return Structured("json_schema", _dumps(schema, where), disable_additional_properties=strict or None)


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{where} is not JSON: {error}", param=where) from None


def _dumps(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise BadRequest(f"{where} is nested too deeply", param=where) from None


def _of_response_format(given: ResponseFormat) -> Structured | None:
    if given.value is not None:
        return _of_value(given.type, given.value)
    if given.type == "json_schema":
        if given.json_schema is None:
            raise BadRequest("response_format has no json_schema", param="response_format.json_schema")
        if given.json_schema.schema is None:
            return Structured("json")
        schema, strict = given.json_schema.schema, given.json_schema.strict
        return schema_output(schema, "response_format.json_schema.schema", strict)
    if given.type == "json_object":
        if given.schema is not None:
            return schema_output(given.schema, "response_format.schema", strict=True)
        return Structured("json")
    if given.type == "structural_tag":
        tag = {name: getattr(given, name) for name in ("format", "structures", "triggers")}
        return _of("structural_tag", {name: value for name, value in tag.items() if value is not None})
    if given.type == "text":
        return None
    raise BadRequest(
        f"response_format has type `{given.type}`",
        "give text, json_object, json_schema or structural_tag",
        param="response_format.type",
    )


def _of_value(kind: str, value: str | Schema) -> Structured:
    """As Hugging Face's client sends it: the `grammar` of Text Generation Inference."""
    where = "response_format.value"
    if kind == "regex" and isinstance(value, str):
        return _of("response_format.regex", value)
    if kind == "json_schema" and isinstance(value, dict):
        value = value.get("schema", True)
    elif kind not in ("json", "json_object"):
        raise BadRequest(f"response_format has type `{kind}` and a value", "give json_schema instead", param=where)
    return schema_output(value, where)
