"""The fields that /api/generate and /api/chat share. Unknown fields are ignored, as in Ollama."""

import re
from typing import Any

import msgspec
from msgspec import Struct

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.server.dialects.dialect import model_field

_NO_TIME = re.compile(r"0{1,20}(ns|us|ms|s|m|h)?")


class OllamaFields(Struct, kw_only=True):
    """Null is the same as absent."""

    model: str
    stream: bool | None = None  # true unless given
    format: Any = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None  # without effect, except that 0 is refused
    truncate: bool | None = None  # true unless given: drop the start of a prompt that does not fit
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


def model_name(body: bytes) -> str | None:
    """`name:latest` is `name`."""
    name = model_field(body)
    return name and bare_name(name)


def bare_name(name: str) -> str:
    return name.removesuffix(":latest")


def num_logprobs(body: OllamaFields) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise BadRequest("top_logprobs is given and logprobs is not true", param="top_logprobs")
    return None


def structured(format: Any) -> Structured | None:
    """ "json", or a JSON schema."""
    if format in (None, ""):
        return None
    if format == "json":
        return Structured("json")
    if isinstance(format, dict):
        return Structured("json_schema", msgspec.json.encode(format).decode(), disable_additional_properties=True)
    shown = repr(format) if isinstance(format, str | int | float) else "a list"
    raise BadRequest(f"invalid format: {shown}", 'send "json" or a JSON schema', param="format")


def refuse(name: str, value: object) -> None:
    if value:
        hint = "this model takes text, and no images" if name.endswith("images") else "leave it out"
        raise BadRequest(f"`{name}` is not supported", hint, param=name)


def refuse_unloading(body: OllamaFields) -> None:
    if body.keep_alive == 0 or (isinstance(body.keep_alive, str) and _NO_TIME.fullmatch(body.keep_alive)):
        raise BadRequest(
            "`keep_alive` is 0, and a model cannot be unloaded by request",
            "leave it out: a model is unloaded when another needs its memory",
            param="keep_alive",
        )
