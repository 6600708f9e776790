"""What the server and the commands ask of an engine: text in, text out."""

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from quire.client.embed_request import Embeddings, EmbedRequest, ScoreRequest, Scores
from quire.client.generate_request import GenerateRequest
from quire.client.generation_config import GenerationConfig
from quire.client.live_client import LiveClient
from quire.core.encode_request import Task
from quire.core.records import RequestRecord, SchedulerStats, StepRecord
from quire.core.structured_defaults import STRUCTURED_DEFAULTS, StructuredDefaults
from quire.text.event import TextEvent
from quire.text.tokenizers.tokenizer import Tokenizer

State = Literal["starting", "ready", "asleep", "stalled", "restarting", "draining", "stopped"]


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
    dimensions: int = 0  # of an embedding, where the model makes them
    path: str = ""  # of its files
    generation: GenerationConfig = field(default_factory=GenerationConfig)  # the defaults of its requests
    structured_defaults: StructuredDefaults = STRUCTURED_DEFAULTS
    max_requests: int = sys.maxsize  # in flight at the same time
    quantization: str | None = None  # as the engine was asked to quantize its weights
    kv_cache_dtype: str = "auto"
    on_gpu: bool = False


TokenGap = tuple[float, int]  # a sample gained so many tokens, so many seconds after it last gained any


class Observer(Protocol):
    """Gets the records as they are made."""

    def step(self, record: StepRecord) -> None: ...

    def rests(self, scheduler: SchedulerStats) -> None:
        """All requests in flight have been cancelled."""

    def tokens(self, gaps: list[TokenGap]) -> None:
        """Samples have gained tokens: a gap for each."""

    def request(self, record: RequestRecord) -> None: ...

    def restarted(self, num_retried: int, num_charged: int) -> None:
        """The engine died and is started again, with `num_retried` requests; it died of `num_charged`, which ended."""

    def loaded(self) -> None:
        """The engine of a model runs."""

    def unloaded(self) -> None:
        """The engine of a model was ended to make room for another."""


class TextStream(Protocol):
    """The events of one request, ending with its final one. Closing it early cancels the request."""

    num_prompt_tokens: int
    prompt_ids: list[int]  # as rendered, tokenized and truncated

    @property
    def record(self) -> RequestRecord | None:
        """Once it has ended or was closed."""

    def listen(self, on_ready: Callable[[], object]) -> None:
        """Call it whenever `take` has something new: once for all that came together."""

    def take(self) -> list[TextEvent]:
        """The events that have come since the last call. One with an `error` is the last."""

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
        """Cancelling the call cancels the request. Raises as `submit` does, and if the model has no embeddings."""

    async def score(self, request: ScoreRequest) -> Scores:
        """The relevance of pairs of texts: by a cross-encoder, or as cosines of embeddings."""

    async def reset_prefix_cache(self, tenant: str = "") -> bool:
        """Forget the prefixes that a tenant has in the KV cache. -> whether none is left: requests in flight keep
        theirs"""

    def watch(self) -> AbstractAsyncContextManager[LiveClient]:
        """Watch the engine as long as the context lasts."""

    async def drain(self) -> None:
        """Take no more requests, and return when those in flight have ended."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that clients can ask for."""

    name: str
    info: ModelInfo | None  # None while the model is not loaded
    adapter_of: str = ""  # the model that it is an adapter of


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The service behind a name."""

    service: Service
    adapter: str = ""  # its name, if the name is an adapter's


class AdapterRegistry(Protocol):
    """The LoRA adapters of one model, by name."""

    def names(self) -> list[str]: ...

    async def load(self, name: str, path: str, in_place: bool = False) -> None:
        """Returns when requests can ask for it; with `in_place`, instead of one of that name. Raises BadRequest."""

    async def unload(self, name: str) -> None:
        """Requests in flight go on with it; later ones cannot name it."""


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How much of a model has been downloaded."""

    sha256: str = ""  # of its largest file, where it is known
    total: int = 0  # bytes; 0 while it is not known
    done: int = 0


class Models(Protocol):
    """The models behind one address, by name."""

    @property
    def state(self) -> State: ...

    def offers(self) -> list[ServedModel]: ...

    async def find(self, name: str | None) -> ResolvedModel:
        """The model of that name, loaded if it was not; None is the first one. Raises UnknownModel."""

    async def load_adapter(self, name: str, path: str, in_place: bool = False, base: str | None = None) -> None:
        """Serve a LoRA adapter under that name; with `in_place`, instead of another. `base` is its model, where
        there are several. Raises BadRequest."""

    async def unload_adapter(self, name: str) -> None:
        """Raises UnknownModel."""

    def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """Download a model, yielding its progress; then it is served under that name. Closing the iterator cancels
        it."""

    async def sleep(self) -> None:
        """End all engines, as soon as requests in flight have ended. Until `wake_up`, requests are refused. Raises
        BadRequest where this is not allowed."""

    async def wake_up(self) -> None:
        """Start the engines that ran before. Models that cannot be loaded stay asleep, and the reason is raised."""

    async def drain(self) -> None:
        """Take no more requests, and return when those in flight have ended."""
