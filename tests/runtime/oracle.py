"""Guesses for tests: right where it has been told what follows, but for mistakes."""

import random
from collections.abc import Mapping, Sequence

from quire.core.draft_tree import ROOT, DraftTree
from quire.ops.opset import Int32
from quire.runtime.spec.proposer import Proposer
from quire.runtime.spec.proposers import Proposers


def oracle(texts: Sequence[Sequence[int]], vocab: int, method: str = "ngram") -> Proposers:
    """In place of that method."""
    return Proposers([(method, Oracle(texts, vocab))], {method: 5})


def tree_oracle(texts: Sequence[Sequence[int]], vocab: int, method: str = "ngram") -> Proposers:
    return Proposers([(method, TreeOracle(texts, vocab))], {method: 5})


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


class TreeOracle(Proposer):
    """Trees of what follows in the texts it knows, and of mistakes beside and behind that, in any order that has
    parents first."""

    def __init__(self, texts: Sequence[Sequence[int]], vocab: int, max_nodes: int = 24) -> None:
        """Prompts and answers."""
        self._texts, self._vocab, self._max_nodes = [list(text) for text in texts], vocab, max_nodes
        self._chance = random.Random(7)

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, DraftTree]:
        trees = {row: self._tree(tokens.tolist()) for row, tokens in known.items()}
        return {row: tree for row, tree in trees.items() if tree.tokens}

    def _tree(self, known: list[int]) -> DraftTree:
        chance, depth = self._chance, self._chance.randrange(7)
        branches: set[tuple[int, ...]] = set()
        for text in self._texts:
            follows = text[len(known) : len(known) + depth] if text[: len(known)] == known else []
            branches |= {tuple(follows[:count]) for count in range(1, len(follows) + 1)}
        for branch in sorted(branches):
            for _ in range(chance.randrange(3)):
                aside = (*branch[:-1], chance.randrange(self._vocab))
                branches |= {aside, (*aside, branch[-1])}
        return self._in_any_order(branches)

    def _in_any_order(self, branches: set[tuple[int, ...]]) -> DraftTree:
        tree, places, waiting = DraftTree([]), {(): ROOT}, sorted(branches)
        while waiting and len(tree.tokens) < self._max_nodes:
            branch = self._chance.choice([one for one in waiting if one[:-1] in places])
            waiting.remove(branch)
            places[branch] = len(tree.tokens)
            tree.tokens.append(branch[-1])
            tree.parents.append(places[branch[:-1]])
            tree.confidences.append(self._chance.uniform(0.4, 0.9))
        return tree
