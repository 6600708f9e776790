"""The engine as the server and the commands see it: text in, text out, nothing about arrays or processes."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

from quire.core.records import RequestRecord, StepRecord
from quire.engine.generate import GenerateRequest
from quire.text.event import TextEvent
from quire.text.tokenizer import Tokenizer

State = Literal["starting", "ready", "restarting", "draining", "stopped"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str  # the name it is served under
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    cache_bytes: int
    num_blocks: int
    block_size: int


class Observer(Protocol):
    """Is told what happened, as it happens."""

    def step(self, record: StepRecord) -> None: ...

    def token(self, seconds: float, count: int) -> None:
        """A sample gained `count` tokens, `seconds` after it last gained any."""

    def request(self, record: RequestRecord) -> None: ...

    def restarted(self) -> None:
        """The engine died and was started again."""


class TextStream(Protocol):
    """The events of one request, ending with its final one. Closing it early cancels the request."""

    num_prompt_tokens: int
    prompt_ids: list[int]  # as rendered, tokenized and truncated

    def __aiter__(self) -> AsyncIterator[TextEvent]: ...

    async def aclose(self) -> None: ...


class Service(Protocol):
    info: ModelInfo
    tokenizer: Tokenizer
    state: State

    async def submit(self, request: GenerateRequest) -> TextStream:
        """Tokenize and queue. Raises BadRequest, QueueFull or Unavailable before anything is streamed."""

    async def drain(self) -> None:
        """Take no more requests, and return when those under way have ended."""
