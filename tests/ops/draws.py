"""What a sampler drew, token by token: tests of samplers compare these."""

from collections.abc import Iterable
from typing import NamedTuple

from quire.core.plan import SampledRow
from quire.core.request import IdLogprob
from quire.ops.sampled_row import BROKEN, CANDIDATES


class Draw(NamedTuple):
    token: int  # or BROKEN or CANDIDATES
    logprobs: list[tuple[int, float, int]]


def draws(sampled: SampledRow) -> list[Draw]:
    """The draws of a row, of which there is one unless drafts were verified."""
    if sampled.error:
        return [Draw(BROKEN, [])]
    if sampled.beams is not None:
        return [Draw(CANDIDATES, _tuples(sampled.beams))]
    logprobs = sampled.logprobs or [[]] * len(sampled.tokens)
    return [Draw(token, _tuples(entries)) for token, entries in zip(sampled.tokens, logprobs, strict=True)]


def first_draws(sampled: Iterable[SampledRow]) -> list[Draw]:
    """One draw a row."""
    return [draws(row)[0] for row in sampled]


def _tuples(entries: Iterable[IdLogprob]) -> list[tuple[int, float, int]]:
    return [(entry.token, entry.logprob, entry.rank) for entry in entries]
