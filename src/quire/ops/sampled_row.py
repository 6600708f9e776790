"""What a sampler drew for a row, as the `SampledRow` that leaves the runner."""

from collections.abc import Iterable, Sequence

from quire.core.plan import SampledRow
from quire.core.request import IdLogprob

Logprobs = list[
    tuple[int, float, int]
]  # (id, logprob, rank): the sampled token, the top ones, listed ones; or candidates
Draw = tuple[int, Logprobs]  # a token, or CANDIDATES or BROKEN

CANDIDATES = -1  # no token was sampled: candidates for beam search were asked for
BROKEN = -2  # no token could be sampled: every permitted logit is -inf or NaN. The request ends with an error


def sampled_row(row: int, draws: Sequence[Draw], mu: float | None = None) -> SampledRow:
    """The row of one draw, or of several tokens. A last one that is BROKEN is left out: the next step draws it first,
    and reports it. `mu`: mirostat's, after them."""
    first, logprobs = draws[0]
    if first == BROKEN:
        return SampledRow(row, error="the model gave no number for any token that may follow")
    if first == CANDIDATES:
        return SampledRow(row, beams=id_logprobs(logprobs))
    if draws[-1][0] == BROKEN:
        draws = draws[:-1]
    tokens = [token for token, _ in draws]
    return SampledRow(row, tokens, [id_logprobs(entries) for _, entries in draws] if logprobs else None, mu=mu)


def id_logprobs(entries: Iterable[tuple[int, float, int]]) -> list[IdLogprob]:
    return [IdLogprob(token, logprob, rank) for token, logprob, rank in entries]
