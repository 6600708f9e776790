"""Of what the device sampled for every line of drafts, what was accepted: on the host."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from torch import Tensor

from quire.core.draft_tree import ROOT, child_with
from quire.core.plan import SampledRow
from quire.ops.sampled_row import Draw, sampled_row


def finish_at_once(
    rows: Sequence[int],
    spans: Sequence[tuple[int, int]],
    num_padded: int,
    arrive: Callable[[], tuple[Tensor, ...]],
    drafts: Sequence[Sequence[int]],
    trees: Sequence[Sequence[int]],
) -> Callable[[], list[SampledRow]]:
    """Of what the device has followed: the tokens of all lines, padding, and `num_padded` numbers of accepted drafts.
    Accepted drafts are the tokens that were sampled, and one more follows them. `trees`: parents; () of a chain"""

    def finish() -> list[SampledRow]:
        (found,) = arrive()
        tokens = found.tolist()
        num_accepted = tokens[len(tokens) - num_padded :]
        of_rows = [
            _accepted_tokens(tokens[first:end], of_row, tree) if tree else tokens[first : first + 1 + accepted]
            for (first, end), accepted, of_row, tree in zip(spans, num_accepted, drafts, trees, strict=False)
        ]
        if min(tokens) >= 0:
            return [SampledRow(row, of_row) for row, of_row in zip(rows, of_rows, strict=True)]
        return [sampled_row(row, [(token, []) for token in of_row]) for row, of_row in zip(rows, of_rows, strict=True)]

    return finish


def _accepted_tokens(tokens: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    return [token for token, _ in accepted_draws([(token, []) for token in tokens], drafts, parents)]


def divided_as(drafts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[Sequence[int]]:
    """The tokens, divided as the drafts are."""
    return [tokens[begin:end] for begin, end in pairwise(accumulate(map(len, drafts), initial=0))]


def accepted_draws(draws: list[Draw], drafts: Sequence[int], parents: Sequence[int]) -> list[Draw]:
    """Of a draw for every line, up to the first token that is not a draft: what was sampled elsewhere is void."""
    accepted: list[Draw] = []
    node: int | None = ROOT
    while node is not None:
        accepted.append(draws[1 + node])
        node = child_with(drafts, parents, node, accepted[-1][0])
    return accepted
