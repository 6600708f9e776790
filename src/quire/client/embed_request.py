"""Requests for embeddings of texts and scores of pairs, and their results."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

Text = str | Sequence[int]  # a text, or its tokens


@dataclass(slots=True, kw_only=True)
class EmbedRequest:
    """An embedding of each text."""

    id: str
    texts: Sequence[Text]
    dimensions: int | None = None  # keep only the first that many numbers, normalized again
    truncate: bool | int = False  # cut texts at their end, to that many tokens; True: to what the model takes
    prompt_name: str | None = None  # one of the checkpoint's prompts, put before every text
    timeout: float | None = None  # seconds


@dataclass(slots=True, kw_only=True)
class ScoreRequest:
    """How well the second text of each pair answers the first."""

    id: str
    pairs: Sequence[tuple[str, str]]
    truncate: bool | int = False  # of a pair, the longer text is cut
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    vectors: list["array[float]"]  # one a text, in order
    num_tokens: int  # encoded, of all texts


@dataclass(frozen=True, slots=True)
class Scores:
    scores: list[float]  # one a pair, in order
    num_tokens: int


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    product, lengths = _dot(one, other), _dot(one, one) * _dot(other, other)
    return product / max(math.sqrt(lengths), 1e-12)


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return math.fsum(map(mul, one, other))
