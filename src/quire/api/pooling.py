"""What `LLM` does with a model that embeds or scores: vLLM's names around `Embedder`."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quire.api.embedder import Embedder
from quire.client.embed_request import Text
from quire.client.generate_request import Prompt
from quire.core.errors import BadRequest
from quire.ops.opset import Float32

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    dimensions: int | None = None  # keep only the first that many numbers, normalized again
    truncate_prompt_tokens: int | None = None  # -1: cut off the end of a text that is too long


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class PoolingOutput:
    data: Float32


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[T]):
    request_id: str
    outputs: T
    finished: bool = True


class Pooler:
    """One output a prompt, in their order."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder
        self._ids = (f"request-{number}" for number in itertools.count())

    def embed(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        return [PoolingRequestOutput(next(self._ids), EmbeddingOutput(v.tolist())) for v in self._rows(prompts, params)]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        return [PoolingRequestOutput(next(self._ids), PoolingOutput(row)) for row in self._rows(prompts, params)]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], params: PoolingParams | None
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        first, second = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        if len(first) not in (1, len(second)):
            raise BadRequest(
                f"{len(first)} texts are to be scored against {len(second)}",
                "give one against several, or as many on both sides",
                param="data_1",
            )
        truncate = _truncates(params)
        if len(first) == 1:
            scores = self.embedder.score(first[0], second, truncate=truncate)
        else:
            pairs = zip(first, second, strict=True)
            scores = [self.embedder.score(query, [text], truncate=truncate)[0] for query, text in pairs]
        return [PoolingRequestOutput(next(self._ids), ScoringOutput(score)) for score in scores]

    def _rows(self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None) -> Iterator[Float32]:
        one = isinstance(prompts, str | Mapping) or (
            len(prompts) > 0 and all(isinstance(token, int) for token in prompts)
        )
        many: list[Any] = [prompts] if one else list(prompts)
        dimensions = params.dimensions if params is not None else None
        texts = [_text(prompt) for prompt in many]
        yield from self.embedder.embed(texts, truncate=_truncates(params), dimensions=dimensions)


def _text(prompt: Any) -> Text:
    if isinstance(prompt, Mapping):
        ids: Text = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        return ids
    text: Text = prompt
    return text


def _truncates(params: PoolingParams | None) -> bool:
    kept = params.truncate_prompt_tokens if params is not None else None
    if kept not in (None, -1):
        raise BadRequest(
            f"truncate_prompt_tokens is {kept}",
            "give -1, which keeps what the model can read, or leave it out",
            param="truncate_prompt_tokens",
        )
    return kept == -1
