"""What a streamed completion or chat says, read after it has ended."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.cli.bench.serve.http_client import LoadFailed, Piece, Reply

MAX_MESSAGE = 500  # characters of an error that are shown


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """Times are time.perf_counter()."""

    sent: float
    moments: list[float]  # when each chunk with text came
    ended: float  # when the last chunk came
    num_prompt: int | None  # tokens, as the server counts them; None where it does not
    num_output: int | None
    text: str

    @property
    def ttft(self) -> float:
        return self.moments[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)]


def read_answer(reply: Reply) -> StreamedAnswer:
    """Raises LoadFailed with what the server said where there is no answer."""
    if reply.status != 200:
        raise LoadFailed(f"status {reply.status}: {error_message(reply.body)}")
    try:
        return _fold(reply)
    except (AttributeError, TypeError) as error:
        raise LoadFailed(f"the stream has an event of another shape than OpenAI's: {error}") from error


def _fold(reply: Reply) -> StreamedAnswer:
    with_text, chunks, texts, usage, finished = [], [], [], None, False
    for moment, event in events_of(reply.pieces):
        if "error" in event or event.get("object") == "error":
            raise LoadFailed(f"the stream ended in an error: {error_message(msgspec.json.encode(event))}")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            chunks.append(moment)
            finished = finished or choice.get("finish_reason") is not None
            if text := _text_of(choice):
                with_text.append(moment)
                texts.append(text)
    if not chunks:
        raise LoadFailed("the stream has no choices")
    if not finished and b"[DONE]" not in reply.body[-64:]:
        raise LoadFailed("the stream ended without a finish_reason and without [DONE]")
    num_prompt, num_output = ((usage or {}).get(name) for name in ("prompt_tokens", "completion_tokens"))
    # Tokens that are no text, such as an end of text that is ignored, still take their time.
    return StreamedAnswer(reply.sent, with_text or chunks, chunks[-1], num_prompt, num_output, "".join(texts))


def _text_of(choice: dict[str, Any]) -> str:
    """A reasoning model's thoughts count: they are tokens that came."""
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"))
    return "".join(part for part in parts if part)


def events_of(pieces: Iterable[Piece]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The objects of a stream of server-sent events, each with the moment its last byte came."""
    rest = b""
    for moment, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                yield moment, _object(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise LoadFailed(f"the stream has an event that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadFailed("the stream has an event that is not a JSON object")
    return value


def error_message(body: bytes) -> str:
    """The message of an error's body, which has OpenAI's shape, that of another API, or is just text."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.DecodeError:
        value = body.decode(errors="replace")
    if isinstance(value, dict):
        value = value.get("error", value)
    if isinstance(value, dict):
        value = value.get("message", value.get("detail", value))
    return " ".join(str(value).split())[:MAX_MESSAGE]
