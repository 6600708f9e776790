"""What a sampler drew, token by token: tests of samplers compare these."""

import random
from collections.abc import Callable, Iterable
from typing import NamedTuple

from quire.core.draft_tree import ROOT, DraftTree
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


def grow_tree(chance: random.Random, vocab: int, max_nodes: int, draw: Callable[[int], int]) -> DraftTree:
    """A tree of drafts around what a sampler draws: others stand beside and behind. draw(line) is called for the line
    of each accepted node, and of the root (line 0), in order."""
    tree, node = DraftTree([]), ROOT

    def add(token: int, parent: int) -> int:
        tree.tokens.append(token)
        tree.parents.append(parent)
        return len(tree.tokens) - 1

    while True:
        token, going = draw(1 + node), chance.random() < 0.8
        others = [other for other in chance.sample(range(vocab), 3) if other != token][: chance.randrange(3)]
        if going:
            others.insert(chance.randrange(len(others) + 1), token)
        if len(tree.tokens) + 2 * len(others) > max_nodes:
            return tree
        added = {other: add(other, node) for other in others}
        for other in others[::2]:
            if other != token:
                add(token, added[other])
        if not going:
            return tree
        node = added[token]


def _tuples(entries: Iterable[IdLogprob]) -> list[tuple[int, float, int]]:
    return [(entry.token, entry.logprob, entry.rank) for entry in entries]
