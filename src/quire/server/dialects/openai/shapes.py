"""The objects that the responses of chat and completions share."""

from typing import Any, Generic, TypedDict, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import PromptTooLong, QuireError
from quire.core.request import DraftUsage
from quire.server.http.wire_format import WireFormat
from quire.text.event import TokenLogprob

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_encode = msgspec.json.Encoder().encode


class CachedTokens(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # of OpenAI's: writing costs nothing here


class PredictionTokens(Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens | UnsetType = UNSET  # where draft tokens were verified

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int, drafts: DraftUsage) -> "CompletionUsage":
        usage = cls(prompt, completion, prompt + completion, CachedTokens(cached))
        if drafts.num_tokens:
            accepted = drafts.num_accepted
            usage.completion_tokens_details = PredictionTokens(accepted, drafts.num_tokens - accepted)
        return usage


class SpeculativeDecoding(Struct):
    """How a request's draft tokens fared, by vLLM's names."""

    mean_acceptance_length: float  # tokens of a verification, with the one sampled after the draft tokens
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [n]: verifications that accepted n draft tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class CompletionMetrics(Struct):
    speculative_decoding: SpeculativeDecoding

    @classmethod
    def of(cls, drafts: DraftUsage) -> "CompletionMetrics | UnsetType":
        """Unset where no draft token was verified."""
        if not drafts.num_tokens:
            return UNSET
        steps, accepted = drafts.num_verifications, drafts.num_accepted
        return cls(
            SpeculativeDecoding(
                mean_acceptance_length=1 + accepted / steps,
                draft_acceptance_rate=accepted / drafts.num_tokens,
                acceptance_histogram=list(drafts.lengths),
                num_spec_steps=steps,
                num_accepted_draft_tokens=accepted,
                num_draft_tokens=drafts.num_tokens,
            )
        )


Choice = TypeVar("Choice")


class CompletionObject(Struct, Generic[Choice], kw_only=True):
    """A response, or a chunk of a stream."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: list[Choice]
    usage: CompletionUsage | UnsetType | None = UNSET
    metrics: CompletionMetrics | UnsetType = UNSET  # beside the usage
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
