"""The engine as the server and the commands see it: text in, text out, nothing about arrays or processes."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
from quire.client.generate_request import GenerateRequest
from quire.client.live_client import LiveClient
from quire.core.encode_request import Task
from quire.core.records import RequestRecord, SchedulerStats, StepRecord
from quire.text.event import TextEvent
from quire.text.tokenizers.tokenizer import Tokenizer

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
    task: Task = "generate"
    dimensions: int = 0  # numbers of a vector, where these are what it makes
    path: str = ""  # of its files


class Observer(Protocol):
    """Is told what happened, as it happens."""

    def step(self, record: StepRecord) -> None: ...

    def rests(self, scheduler: SchedulerStats) -> None:
        """What was under way has been cancelled, and there is nothing else."""

    def token(self, seconds: float, count: int) -> None:
        """A sample gained `count` tokens, `seconds` after it last gained any."""

    def request(self, record: RequestRecord) -> None: ...

    def restarted(self) -> None:
        """The engine died and was started again."""

    def loaded(self) -> None:
        """There is an engine for it, from now on."""

    def unloaded(self) -> None:
        """The engine ended because others needed the room."""


class TextStream(Protocol):
    """The events of one request, ending with its final one. Closing it early cancels the request."""

    num_prompt_tokens: int
    prompt_ids: list[int]  # as rendered, tokenized and truncated

    @property
    def record(self) -> RequestRecord | None:
        """Once it has ended or was closed."""

    @property
    def num_ready(self) -> int:
        """Events that can be had without waiting."""

    def __aiter__(self) -> AsyncIterator[TextEvent]: ...

    async def aclose(self) -> None: ...


class Service(Protocol):
    """One model."""

    info: ModelInfo
    tokenizer: Tokenizer

    @property
    def state(self) -> State: ...

    async def submit(self, request: GenerateRequest) -> TextStream:
        """Tokenize and queue. Raises BadRequest, QueueFull or Unavailable before anything is streamed."""

    async def embed(self, request: EmbedRequest) -> Embeddings:
        """Cancelling the call cancels the request. Raises as `submit` does, and where the model has no vectors."""

    async def score(self, request: ScoreRequest) -> Scores:
        """By a cross-encoder, or as cosines of vectors."""

    def watch(self) -> AbstractAsyncContextManager[LiveClient]:
        """Look at the engine, as long as the context lasts."""

    async def drain(self) -> None:
        """Take no more requests, and return when those under way have ended."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that clients can ask for."""

    name: str
    info: ModelInfo | None  # None while the model is not loaded
    adapter_of: str = ""  # the model that it is an adapter of


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a name leads to."""

    service: Service
    adapter: str = ""  # the adapter's name, where the name is that of one


class AdapterRegistry(Protocol):
    """The LoRA adapters of one model, by name."""

    def names(self) -> list[str]: ...

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Returns when requests can ask for it; with `in_place`, instead of one of that name. Raises BadRequest."""

    async def unload(self, name: str) -> None:
        """Requests under way go on with it; from now on there are no others."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How much of a model has come."""

    sha256: str = ""  # of its largest file, where it is known
    total: int = 0  # bytes; 0 while nobody knows
    done: int = 0


class Models(Protocol):
    """The models behind one address, by name."""

    @property
    def state(self) -> State: ...

    def offers(self) -> list[ServedModel]: ...

    async def find(self, name: str | None) -> ResolvedModel:
        """The model of that name, loaded if it was not; None is the first one. Raises UnknownModel."""

    async def load_adapter(self, name: str, path: str, in_place: bool = False, base: str | None = None) -> None:
        """From now on the name leads to a LoRA adapter; with `in_place`, also if it has led to another. `base` is the
        model that it is one of, where there are several. Raises BadRequest."""

    async def unload_adapter(self, name: str) -> None:
        """From now on it leads nowhere. Raises UnknownModel."""

    def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Fetch a model, telling how far it is; when it ends, the name leads to it. Closing it gives it up."""

    async def drain(self) -> None:
        """Take no more requests, and return when those under way have ended."""
