"""The objects that SGLang's native API sends."""

from typing import Any, TypedDict

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import QuireError
from quire.core.request import FinishReason
from quire.server.http.wire_format import WireFormat
from quire.text.event import TokenLogprob

_encode = msgspec.json.Encoder().encode

ShownLogprob = tuple[float | None, int, str | None]  # null: of the first token; the text only where it is asked for


class MetaInfo(Struct, kw_only=True):
    id: str
    finish_reason: dict[str, Any] | None  # null until the end
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str = "default"
    e2e_latency: float | UnsetType = UNSET  # seconds; at the end
    input_token_logprobs: list[ShownLogprob] | UnsetType = UNSET
    output_token_logprobs: list[ShownLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[ShownLogprob] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[ShownLogprob]] | UnsetType = UNSET


class Generated(Struct, kw_only=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | UnsetType = UNSET  # in a stream of several


def finish_reason(
    reason: FinishReason | None, stop_reason: str | int | None, output_ids: list[int]
) -> dict[str, Any] | None:
    """`matched` is the stop string, or the token that ended the text."""
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": len(output_ids)}
    matched = output_ids[-1] if stop_reason is None and output_ids else stop_reason
    return {"type": "stop", "matched": matched}


def shown(token: TokenLogprob, with_text: bool) -> ShownLogprob:
    return token.finite_logprob, token.token_id, token.text if with_text else None


class SglangErrorMessage(TypedDict):
    message: str


class SglangErrorBody(TypedDict):
    error: SglangErrorMessage


def error_body(error: QuireError) -> SglangErrorBody:
    return {"error": {"message": f"{error.message} ({error.hint})" if error.hint else error.message}}


def sse(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


WIRE = WireFormat(error=error_body, frame=sse, last=b"data: [DONE]\n\n")
