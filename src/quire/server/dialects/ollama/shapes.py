"""The objects of Ollama's responses, one on each line. Durations are in nanoseconds."""

import time
from datetime import UTC, datetime
from typing import Any, TypedDict

import msgspec
from msgspec import UNSET, Struct, UnsetType

from quire.core.errors import QueueFull, QuireError, UnknownModel
from quire.server.http.wire_format import WireFormat
from quire.text.event import TokenLogprob

_encode = msgspec.json.Encoder().encode


class OllamaTopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaTopLogprob):
    top_logprobs: list[OllamaTopLogprob]


class OllamaMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[Any] | UnsetType = UNSET


class OllamaResponse(Struct, kw_only=True):
    """Of /api/generate and /api/chat, whole or one delta."""

    model: str
    created_at: str
    response: str | UnsetType = UNSET  # generate
    thinking: str | UnsetType = UNSET  # generate
    message: OllamaMessage | UnsetType = UNSET  # chat
    logprobs: list[OllamaLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class CallClock:
    """The durations of a call: loading, prefill, decode."""

    def __init__(self) -> None:
        self._arrived = time.monotonic_ns()
        self._begun: int | None = None
        self._first: int | None = None

    def begin(self) -> None:
        self._begun = time.monotonic_ns()

    def token(self, seconds: float | None = None) -> None:
        """The first token came now, or at `seconds` of time.monotonic()."""
        if self._first is None:
            self._first = time.monotonic_ns() if seconds is None else int(seconds * 1e9)

    def write(self, answer: OllamaResponse, num_prompt: int, num_output: int) -> None:
        now = time.monotonic_ns()
        begun = self._begun or now
        first = self._first or now
        answer.total_duration = now - self._arrived
        answer.load_duration = begun - self._arrived
        answer.prompt_eval_count, answer.prompt_eval_duration = num_prompt, first - begun
        answer.eval_count, answer.eval_duration = num_output, now - first


def timestamp(seconds: float | None = None) -> str:
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def logprobs_of(positions: list[list[TokenLogprob]], num_top: int) -> list[OllamaLogprob]:
    logprobs = []
    for position in positions:
        by_rank = sorted({token.token_id: token for token in position}.values(), key=lambda token: token.rank)
        top = [OllamaTopLogprob(token.text, token.finite_logprob, token.bytes) for token in by_rank[:num_top]]
        logprobs.append(OllamaLogprob(position[0].text, position[0].finite_logprob, position[0].bytes, top))
    return logprobs


class OllamaErrorBody(TypedDict):
    error: str


def error_body(error: QuireError) -> OllamaErrorBody:
    if isinstance(error, UnknownModel):  # clients look for these words
        return {"error": f"{error.message.replace('no model', 'model')} not found ({error.hint})"}
    return {"error": f"{error.message} ({error.hint})" if error.hint else error.message}


def error_status(error: QuireError) -> int:
    return 503 if isinstance(error, QueueFull) else error.status


LINES = "application/x-ndjson"


def line(value: object) -> bytes:
    return _encode(value) + b"\n"


WIRE = WireFormat(error=error_body, frame=line, status=error_status, media_type=LINES)
