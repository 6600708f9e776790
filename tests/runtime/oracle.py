"""Guesses for tests: right where it has been told what follows, but for mistakes."""

import random
from collections.abc import Mapping, Sequence

from quire.ops.opset import Int32
from quire.runtime.spec.proposer import Proposer
from quire.runtime.spec.proposers import Proposers


def oracle(texts: Sequence[Sequence[int]], vocab: int, method: str = "ngram") -> Proposers:
    """In place of that method."""
    return Proposers([(method, Oracle(texts, vocab))], {method: 5})


class Oracle(Proposer):
    def __init__(self, texts: Sequence[Sequence[int]], vocab: int) -> None:
        """Prompts and answers."""
        self._texts, self._vocab = [list(text) for text in texts], vocab
        self._chance = random.Random(5)

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        guesses = {}
        for row, tokens in known.items():
            text = next((text for text in self._texts if text[: len(tokens)] == tokens.tolist()), [])
            follows = text[len(tokens) : len(tokens) + self._chance.randrange(6)]
            guesses[row] = [
                token if self._chance.random() < 0.9 else self._chance.randrange(self._vocab) for token in follows
            ]
        return {row: drafts for row, drafts in guesses.items() if drafts}
