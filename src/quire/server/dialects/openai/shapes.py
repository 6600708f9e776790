"""The objects that the responses of chat and completions share."""

from typing import Any, Generic, TypedDict, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import PromptTooLong, QuireError
from quire.server.http.wire_format import WireFormat
from quire.text.event import TokenLogprob

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_encode = msgspec.json.Encoder().encode


class CachedTokens(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # of OpenAI's: writing costs nothing here


class CompletionUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> "CompletionUsage":
        return cls(prompt, completion, prompt + completion, CachedTokens(cached))


Choice = TypeVar("Choice")


class CompletionObject(Struct, Generic[Choice], kw_only=True):
    """A response, or a chunk of a stream."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: list[Choice]
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_logprobs: Any = UNSET  # chat
    prompt_token_ids: list[int] | UnsetType = UNSET  # chat


class OpenAIErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorBody(TypedDict):
    error: OpenAIErrorDetail


def error_body(error: QuireError) -> OpenAIErrorBody:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    if isinstance(error, PromptTooLong):
        message = f"This model's maximum context length is too small: {message}"  # clients look for this
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def sse(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


KEEP_ALIVE = b": keep-alive\n\n"  # a comment of server-sent events
WIRE = WireFormat(error=error_body, frame=sse, last=b"data: [DONE]\n\n", keep_alive=KEEP_ALIVE)


def token_name(token_id: int, text: str, by_id: bool) -> str:
    """The name of a token in logprobs. Different tokens may have the same text."""
    return f"token_id:{token_id}" if by_id else text


def prompt_logprobs_of(positions: list[list[TokenLogprob]] | None) -> list[dict[str, Any] | None]:
    """As in vLLM: by token id. The first token has none."""
    shown: list[dict[str, Any] | None] = [None]
    for position in positions or ():
        shown.append(
            {
                str(token.token_id): {"logprob": token.finite_logprob, "rank": token.rank, "decoded_token": token.text}
                for token in position
            }
        )
    return shown
