"""What is asked of a model that reads texts instead of continuing them."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

Text = str | Sequence[int]  # a text, or its tokens


@dataclass(slots=True, kw_only=True)
class EmbedRequest:
    """A vector of each text."""

    id: str
    texts: Sequence[Text]
    dimensions: int | None = None  # only the first so many numbers, made of length 1 again
    truncate: bool = False  # a text that is too long loses its end; otherwise it is refused
    prompt_name: str | None = None  # of the prompts that the checkpoint has: put before every text
    timeout: float | None = None  # seconds until the request is given up


@dataclass(slots=True, kw_only=True)
class ScoreRequest:
    """How well the second text of each pair answers the first."""

    id: str
    pairs: Sequence[tuple[str, str]]
    truncate: bool = False
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    vectors: list["array[float]"]  # one a text, in order
    num_tokens: int  # read in all


@dataclass(frozen=True, slots=True)
class Scores:
    scores: list[float]  # one a pair, in order
    num_tokens: int


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product, lengths = _dot(one, other), _dot(one, one) * _dot(other, other)
    return product / max(math.sqrt(lengths), 1e-12)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(map(mul, one, other))
