"""A tree of drafts that grows level by level."""

from collections.abc import Sequence

from quire.core.draft_tree import ROOT, DraftTree


class GrowingTree:
    """All nodes that a head has looked at, and how likely each of them and its ancestors are together."""

    def __init__(self) -> None:
        self.tree = DraftTree([])
        self._probabilities: list[float] = []
        self._level: Sequence[int] = ()  # the nodes added last

    def add_level(self, parents: Sequence[int], children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Below each of `parents`, nodes of the level added last: (token, its probability after the parent)."""
        first = len(self.tree.tokens)
        for parent, of_parent in zip(parents, children, strict=True):
            for token, probability in of_parent:
                self._add(token, parent, probability)
        self._level = range(first, len(self.tree.tokens))

    def _add(self, token: int, parent: int, probability: float) -> None:
        self.tree.tokens.append(token)
        self.tree.parents.append(parent)
        self.tree.confidences.append(probability)
        self._probabilities.append(probability * (1.0 if parent == ROOT else self._probabilities[parent]))

    def likeliest(self, count: int) -> list[int]:
        """Of the nodes added last."""
        return self._sorted(self._level)[:count]

    def best(self, count: int) -> DraftTree:
        """The tree of the likeliest nodes. A node is at most as likely as its parent, which comes before it."""
        return self.tree.keep(self._sorted(range(len(self.tree.tokens)))[:count])

    def _sorted(self, nodes: Sequence[int]) -> list[int]:
        return sorted(nodes, key=lambda node: -self._probabilities[node])
