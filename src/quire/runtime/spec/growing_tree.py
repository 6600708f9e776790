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


class ComputedTree(GrowingTree):
    """With the nodes that the head has computed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[int] = []
        self.parents: list[int] = []  # of each of them: an earlier one, or ROOT
        self.depths: list[int] = []
        self._num_newest = 0

    def compute(self, count: int) -> bool:
        """The likeliest nodes of the last level, next. -> whether there are some"""
        places = {node: place for place, node in enumerate(self.computed)}
        newest = self.likeliest(count)
        for node in newest:
            parent = places.get(self.tree.parents[node], ROOT)
            self.computed.append(node)
            self.parents.append(parent)
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
        self._num_newest = len(newest)
        return bool(newest)

    @property
    def newest(self) -> range:
        """The places of the nodes that were computed last."""
        return range(len(self.computed) - self._num_newest, len(self.computed))
