"""Texts to be read, not continued: a vector or a score comes back for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Task = Literal["generate", "embed", "score"]  # what a model is served for


@dataclass(frozen=True, slots=True)
class EncodeInput:
    """A text, or a pair of texts."""

    ids: Sequence[int]
    segments: Sequence[int] | None = None  # which of the two a token belongs to; None: there is one


@dataclass(slots=True, kw_only=True)
class EncodeRequest:
    """Crosses the process boundary as it is and is never changed."""

    id: str
    texts: list[EncodeInput]
    dimensions: int | None = None  # only the first so many numbers of each vector
    deadline: float | None = None  # time.monotonic(); past it nothing more of it is read

    @property
    def num_tokens(self) -> int:
        return sum(len(text.ids) for text in self.texts)


@dataclass(slots=True, kw_only=True)
class EncodeEvent:
    """What became of one text of a request."""

    request_id: str
    index: int
    numbers: bytes = b""  # float32: its vector, or its score
    reason: str = ""  # why there is none, and nothing more will come of the request
