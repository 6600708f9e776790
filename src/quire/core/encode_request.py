"""Texts to encode: an embedding or a score comes back for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Task = Literal["generate", "embed", "score"]  # what a model is served for


@dataclass(frozen=True, slots=True)
class EncodeInput:
    """A text, or a pair of texts."""

    ids: Sequence[int]
    segments: Sequence[int] | None = None  # for each token 0 or 1, its text of the pair; None: one text


@dataclass(slots=True, kw_only=True)
class EncodeRequest:
    """Texts to encode together. It crosses the process boundary and is never changed."""

    id: str
    texts: list[EncodeInput]
    dimensions: int | None = None  # the length that embeddings are truncated to
    deadline: float | None = None  # time.monotonic(); then the texts that are left are not encoded

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)


@dataclass(slots=True, kw_only=True)
class EncodeEvent:
    """The embedding or the score of one text of a request, or why there is none."""

    request_id: str
    index: int
    numbers: bytes = b""  # float32: the embedding, or one score
    reason: str = ""  # why the request failed; it has no further events
