"""Draft tokens that branch: several continuations, which share what they have in common.

A tree is a list of tokens (nodes) and the parent of each: an earlier node, or ROOT, the last known token. So its first
nodes, however many, are a tree as well. A chain, in which every node follows the one before it, has no parents. Where
only the device knows a tree, all parents are UNKNOWN_PARENT."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROOT = -1
UNKNOWN_PARENT = -2
MAX_TREE_NODES = 63  # of one run: a word has a bit for each of them, and one for the token before them


@dataclass(slots=True)
class DraftTree:
    """The likeliest nodes come first. Siblings have different tokens."""

    tokens: list[int]
    parents: list[int] = field(default_factory=list)  # empty: a chain
    # Of each node, how likely the method holds it after its parent. A tree has them; empty: a chain without.
    confidences: list[float] = field(default_factory=list)

    def check(self) -> None:
        """Assert that every node has a parent before it, and that a tree has confidences."""
        assert len(self.parents) in (0, len(self.tokens)), f"{len(self.tokens)} nodes and {len(self.parents)} parents"
        allowed = (len(self.tokens),) if self.parents else (0, len(self.tokens))
        assert len(self.confidences) in allowed, f"{len(self.tokens)} nodes and {len(self.confidences)} confidences"
        for node, parent in enumerate(self.parents):
            assert ROOT <= parent < node, f"node {node} has the parent {parent}"

    def depths(self) -> list[int]:
        """Of every node: 1 for the children of the root."""
        return depths(self.parents) if self.parents else list(range(1, 1 + len(self.tokens)))

    def keep(self, nodes: Sequence[int]) -> "DraftTree":
        """These nodes, in order. Their ancestors are among them."""
        places = {ROOT: ROOT, **{node: place for place, node in enumerate(nodes)}}
        parents = [places[self.parents[node] if self.parents else node - 1] for node in nodes]
        confidences = [self.confidences[node] for node in nodes] if self.confidences else []
        return DraftTree([self.tokens[node] for node in nodes], without_chain(parents), confidences)

    def first_branch(self) -> "DraftTree":
        """The chain of first children: what is left where a tree cannot be computed."""
        nodes = [ROOT]
        while (child := next(iter(children(self.parents, nodes[-1], len(self.tokens))), None)) is not None:
            nodes.append(child)
        return self.keep(nodes[1:])


def parent_of(parents: Sequence[int], node: int) -> int:
    return parents[node] if parents else node - 1


def is_unknown(parents: Sequence[int]) -> bool:
    """Whether only the device knows this tree."""
    return bool(parents) and parents[0] == UNKNOWN_PARENT


def without_chain(parents: Sequence[int]) -> list[int]:
    """No parents, if the tree is a chain."""
    return [] if all(parent == node - 1 for node, parent in enumerate(parents)) else list(parents)


def children(parents: Sequence[int], parent: int, num_nodes: int) -> list[int]:
    """The nodes that follow `parent`, in order."""
    if not parents:
        return list(range(parent + 1, num_nodes))[:1]
    return [node for node in range(parent + 1, num_nodes) if parents[node] == parent]


def child_with(drafts: Sequence[int], parents: Sequence[int], parent: int, token: int) -> int | None:
    """The child of `parent` that has this token."""
    return next((node for node in children(parents, parent, len(drafts)) if drafts[node] == token), None)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to `node`, itself among them."""
    path = []
    while node != ROOT:
        path.append(node)
        node = parent_of(parents, node)
    return path[::-1]


def depths(parents: Sequence[int]) -> list[int]:
    """Of every node: 1 for the children of the root."""
    found: list[int] = []
    for parent in parents:
        found.append(1 + (found[parent] if parent != ROOT else 0))
    return found


def ancestor_words(parents: Sequence[int]) -> list[int]:
    """A word for the root and for each node, whose bits are what it sees of these, itself among them: bit 0 is the
    root, bit 1 + n is node n."""
    words = [1]
    for node, parent in enumerate(parents, 1):
        words.append(words[1 + parent] | 1 << node)
    return words


def accepted_path(drafts: Sequence[int], parents: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The nodes whose tokens were sampled, one after the other. `tokens` ends with the first that is no draft."""
    path = [ROOT]
    for token in tokens:
        if (node := child_with(drafts, parents, path[-1], token)) is None:
            break
        path.append(node)
    return path[1:]


def compared_levels(
    drafts: Sequence[int], parents: Sequence[int], tokens: Sequence[int]
) -> Iterator[tuple[list[int], int | None]]:
    """What the sampled tokens tell of the nodes: level by level, those that could have been sampled, and the one that
    was. After a level of which none was, nothing is known."""
    node: int | None = ROOT
    for token in tokens:
        assert node is not None
        level = children(parents, node, len(drafts))
        if not level:
            return
        node = next((child for child in level if drafts[child] == token), None)
        yield level, node
        if node is None:
            return
