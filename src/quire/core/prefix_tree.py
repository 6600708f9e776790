"""The prefix cache: full blocks as a tree. A node is one block; the path to it is the prefix it continues."""

from collections.abc import Callable, Iterator
from typing import Protocol

from quire.core.block_keys import BlockKey, child_key

Namespace = tuple[str, str, str]  # (tenant, salt, adapter): prefixes are shared within one only
EVICTED = -1  # instead of a block id
NO_STATE = -1  # instead of a state slot


class PrefixNode:
    """One full block. Its keys and values depend on every token before it, so it is looked up below its parent."""

    __slots__ = ("block", "children", "hash", "key", "parent", "state", "tokens", "touched")

    def __init__(self, block: int, tokens: tuple[int, ...], parent: "PrefixNode | None", key: BlockKey = b"") -> None:
        self.block = block
        self.key = key  # its name beyond the pool; empty: it has none
        self.hash = 0  # its name in events
        self.touched = 0.0  # time.monotonic() when it was last marked as used on disk, or written
        self.state = NO_STATE  # the slot of a checkpoint: the model's state after this block
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, ...], PrefixNode] = {}


class NamespaceRoot(PrefixNode):
    """The root of a cache namespace. It has no block, and exists as long as it has children."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace, key: BlockKey = b"") -> None:
        super().__init__(EVICTED, (), None, key)
        self.namespace = namespace


class TreeListener(Protocol):
    """Is told what the tree gains and loses."""

    def stored(self, node: PrefixNode) -> None: ...

    def removed(self, node: PrefixNode) -> None: ...


class PrefixTree:
    """Full blocks that can be shared. A sequence that holds the block of a node holds those of its ancestors. So the
    least recently used free block is always a leaf, and its eviction orphans no other block.

    With `has_gaps` that is not so: a sliding window frees blocks from the front. A node whose block was evicted stays
    as long as it has children."""

    def __init__(self, block_size: int, has_gaps: bool = False) -> None:
        self.block_size = block_size
        self.has_gaps = has_gaps
        self.root_key: Callable[[Namespace], BlockKey] = lambda namespace: b""  # set where blocks go beyond the pool
        self.listener: TreeListener | None = None
        self.removed: Callable[[PrefixNode], None] | None = None  # set where nodes have checkpoints, or pages
        self._roots: dict[Namespace, NamespaceRoot] = {}
        self._nodes: dict[int, PrefixNode] = {}  # by block

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, block: int) -> PrefixNode | None:
        return self._nodes.get(block)

    def match(
        self, namespace: Namespace, node: PrefixNode | None, tokens: list[int], start: int, stop: int
    ) -> list[PrefixNode]:
        """The longest path below `node` (None: the root of `namespace`) along the blocks start .. stop of `tokens`."""
        size, path = self.block_size, []
        node = node or self._roots.get(namespace)
        for i in range(start, stop):
            node = node and node.children.get(tuple(tokens[i * size : (i + 1) * size]))
            if node is None:
                break
            path.append(node)
        return path

    def insert(
        self, namespace: Namespace, node: PrefixNode | None, tokens: tuple[int, ...], block: int
    ) -> PrefixNode | None:
        """Insert `block` below `node`; None if another block has the same tokens there: the tree keeps the first."""
        if node is None and (node := self._roots.get(namespace)) is None:
            node = self._roots[namespace] = NamespaceRoot(namespace, self.root_key(namespace))
        child = node.children.get(tokens)
        if child is None:
            key = child_key(node.key, tokens) if node.key else b""
            child = node.children[tokens] = PrefixNode(block, tokens, node, key)
        elif child.block == EVICTED:
            child.block = block
        else:
            return None
        self._nodes[block] = child
        if self.listener is not None:
            self.listener.stored(child)
        return child

    def remove(self, block: int) -> None:
        node = self._nodes.pop(block)
        assert self.has_gaps or not node.children, f"block {block} is evicted before the blocks that follow it"
        if self.removed is not None:
            self.removed(node)
        node.block = EVICTED
        if self.listener is not None:
            self.listener.removed(node)
        while node.block == EVICTED and not node.children:
            parent = node.parent
            if parent is None:
                assert isinstance(node, NamespaceRoot)
                del self._roots[node.namespace]
                return
            del parent.children[node.tokens]
            node = parent

    def belongs_to(self, block: int, tenant: str) -> bool:
        node = self._nodes[block]
        while node.parent is not None:
            node = node.parent
        assert isinstance(node, NamespaceRoot)
        return node.namespace[0] == tenant

    def holds(self, tenant: str) -> bool:
        return any(namespace[0] == tenant for namespace in self._roots)

    def walk(self) -> Iterator[PrefixNode]:
        stack: list[PrefixNode] = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not isinstance(node, NamespaceRoot):
                yield node

    def check(self) -> None:
        assert all(root.children for root in self._roots.values()), "a namespace without blocks is kept"
        nodes = {node.block: node for node in self.walk() if node.block != EVICTED}
        assert nodes == self._nodes, "the tree and its index by block disagree"
        evicted = [node for node in self.walk() if node.block == EVICTED]
        assert all(node.children for node in evicted), "a node has neither a block nor children"
        assert self.has_gaps or not evicted, "a node has no block, and there is no sliding window"
        for node in nodes.values():
            assert len(node.tokens) == self.block_size, f"block {node.block} is in the tree and not full"
