"""The objects that Text Generation Inference sends."""

from typing import Any, TypedDict

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import BadRequest, EngineFailed, QueueFull, QuireError, UnknownModel
from quire.core.request import FinishReason
from quire.server.http.wire_format import WireFormat

_encode = msgspec.json.Encoder().encode


class PrefillToken(Struct):
    id: int
    text: str
    logprob: float | None  # null for the first token


class Token(Struct):
    id: int
    text: str
    logprob: float
    special: bool


class Details(Struct, kw_only=True):
    """Of one completion."""

    finish_reason: str
    generated_tokens: int
    seed: int | None  # null without sampling
    generated_text: str | UnsetType = UNSET  # in `best_of_sequences`
    prefill: list[PrefillToken] | UnsetType = UNSET
    tokens: list[Token] | UnsetType = UNSET
    top_tokens: list[list[Token]] | UnsetType = UNSET
    best_of_sequences: list[Any] | UnsetType = UNSET
    input_length: int | UnsetType = UNSET  # in a stream


class TgiResponse(Struct, kw_only=True, omit_defaults=True):
    generated_text: str
    details: Details | None = None


class StreamedToken(Struct, kw_only=True):
    index: int  # the first is 1
    token: Token
    top_tokens: list[Token] | UnsetType = UNSET
    generated_text: str | None = None  # with the last token
    details: Details | None = None


def finish_reason(reason: FinishReason | None, stop_reason: str | int | None) -> str:
    if reason == "length":
        return "length"
    return "eos_token" if stop_reason is None else "stop_sequence"


_KINDS: list[tuple[type[QuireError], int, str]] = [
    (BadRequest, 422, "validation"),
    (UnknownModel, 422, "validation"),  # an unknown adapter
    (QueueFull, 429, "overloaded"),
    (EngineFailed, 424, "generation"),
]


def error_kind(error: QuireError) -> tuple[int, str]:
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            return status, name
    return error.status, error.code


def error_status(error: QuireError) -> int:
    return error_kind(error)[0]


class TgiErrorBody(TypedDict):
    error: str
    error_type: str


def error_body(error: QuireError) -> TgiErrorBody:
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    kind = error_kind(error)[1]
    prefix = {"validation": "Input validation error: ", "generation": "Request failed during generation: "}
    return {"error": prefix.get(kind, "") + message, "error_type": kind}


def sse(value: object) -> bytes:
    return b"data:" + _encode(value) + b"\n\n"


WIRE = WireFormat(error=error_body, frame=sse, status=error_status)
