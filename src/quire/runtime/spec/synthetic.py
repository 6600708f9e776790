"""Synthetic acceptance, a tool of benchmarks: drafts are accepted by chance. The text is not the model's.

It tells what a method would gain on a machine at an acceptance rate that was published, or is hoped for, without a
method that reaches it. Steps compute and sample all they would."""

import random
from collections.abc import Mapping, Sequence

from quire.core.plan import SampledRow
from quire.ops.opset import Int32


class SyntheticAcceptance:
    def __init__(self, rates: Sequence[float]) -> None:
        """By position, the probability that all drafts up to it are accepted."""
        self._rates = rates
        self._random = random.Random(0)
        self._drawn: dict[int, int] = {}  # by row, how many drafts will be accepted

    def draw(self, row: int, num_drafts: int) -> int:
        """How many drafts `accept` will accept. A row that is asked for again has another tenant."""
        chance = self._random.random()
        self._drawn[row] = sum(chance < rate for rate in self._rates[:num_drafts])
        return self._drawn[row]

    def accept(self, sampled: SampledRow, drafts: Sequence[int]) -> None:
        """Replace what a verification sampled; drafts that only the device knows, by any token. A row with logprobs or
        an error stays as it is."""
        drawn = self._drawn.pop(sampled.row, None)
        if not sampled.tokens or sampled.logprobs is not None:
            return
        accepted = self.draw(sampled.row, len(drafts)) if drawn is None else drawn
        self._drawn.pop(sampled.row, None)
        last = sampled.tokens[-1]
        sampled.tokens = [*(token if token >= 0 else last for token in drafts[:accepted]), last]

    def pad(
        self, drafted: Mapping[int, list[int]], known: Mapping[int, Int32], counts: Mapping[int, int]
    ) -> dict[int, list[int]]:
        """All draft tokens that were wanted of a method which found fewer: any will do."""
        return {
            row: [*drafted.get(row, []), *[int(tokens[-1])] * counts[row]][: counts[row]]
            for row, tokens in known.items()
        }
