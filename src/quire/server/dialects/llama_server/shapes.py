"""The objects that llama-server sends."""

import time
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import PromptTooLong, QuireError
from quire.server.http.wire_format import WireFormat
from quire.text.event import TokenLogprob

_encode = msgspec.json.Encoder().encode


class LlamaTopLogprob(Struct):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaLogprob(LlamaTopLogprob):
    top_logprobs: list[LlamaTopLogprob]


class Timings(Struct):
    """Milliseconds, and tokens per second."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | UnsetType = UNSET  # draft tokens that were verified, where any were
    draft_n_accepted: int | UnsetType = UNSET


class LlamaCompletion(Struct, kw_only=True):
    """A whole completion, or one piece of a stream, whose last has everything but the text."""

    index: int = 0
    content: str
    tokens: list[int] = msgspec.field(default_factory=list)
    stop: bool = False
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: list[LlamaLogprob] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET  # eos, limit or word
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


class PrefillClock:
    """The times of one request: its prefill, then its decoding."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None

    def begin(self) -> None:
        self._began = time.monotonic()

    def token(self, moment: float | None = None) -> None:
        """The first token came now, or at a moment of time.monotonic()."""
        self._first = self._first or moment or time.monotonic()

    def timings(self, num_prompt: int, num_cached: int, num_output: int) -> Timings:
        now = time.monotonic()
        first = self._first or now
        prompt, output = (first - self._began) * 1e3, (now - first) * 1e3
        computed = num_prompt - num_cached
        return Timings(
            num_cached, computed, prompt, *_rates(computed, prompt), num_output, output, *_rates(num_output, output)
        )


def _rates(count: int, milliseconds: float) -> tuple[float, float]:
    return milliseconds / max(count, 1), count / max(milliseconds, 1e-6) * 1e3


def logprobs_of(positions: list[list[TokenLogprob]], num_top: int) -> list[LlamaLogprob]:
    shown = []
    for position in positions:
        by_rank = sorted({token.token_id: token for token in position}.values(), key=lambda token: token.rank)
        shown.append(LlamaLogprob(*_told(position[0]), [LlamaTopLogprob(*_told(token)) for token in by_rank[:num_top]]))
    return shown


def _told(token: TokenLogprob) -> tuple[int, str, list[int], float]:
    return token.token_id, token.text, token.bytes, token.finite_logprob


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "unavailable_error", 503: "unavailable_error"}


class LlamaErrorDetail(TypedDict):
    code: int
    message: str
    type: str


class LlamaErrorBody(TypedDict):
    error: LlamaErrorDetail


def error_body(error: QuireError) -> LlamaErrorBody:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    if isinstance(error, PromptTooLong):
        kind = "exceed_context_size_error"
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    return {"error": {"code": error.status, "message": message, "type": kind}}


def sse(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


WIRE = WireFormat(error=error_body, frame=sse)
