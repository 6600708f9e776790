"""Which full blocks hold which tokens, as a tree: a node is one block whose meaning is the path that leads to it."""

from collections.abc import Iterator

Realm = tuple[str, str]  # (tenant, salt): nothing is shared across realms


class Node:
    """One full block. Its keys and values depend on every token before it, so it is found under its parent only."""

    __slots__ = ("block", "children", "parent", "tokens")

    def __init__(self, block: int, tokens: tuple[int, ...], parent: "Node | None") -> None:
        self.block = block
        self.tokens = tokens
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}


class Root(Node):
    """Where the prefixes of a realm begin; it names no block, and lives as long as it has children."""

    __slots__ = ("realm",)

    def __init__(self, realm: Realm) -> None:
        super().__init__(-1, (), None)
        self.realm = realm


class PrefixTree:
    """Full blocks that can be shared. Whoever holds a node's block holds those of its ancestors as well; so of the
    free blocks a leaf is always the least recently used, and taking that one away never orphans another."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._roots: dict[Realm, Root] = {}
        self._nodes: dict[int, Node] = {}  # by block

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, realm: Realm, node: Node | None, tokens: list[int], start: int, stop: int) -> list[Node]:
        """The longest path below `node` (None: the root of `realm`) along the blocks start .. stop of `tokens`."""
        size, path = self.block_size, []
        node = node or self._roots.get(realm)
        for i in range(start, stop):
            node = node and node.children.get(tuple(tokens[i * size : (i + 1) * size]))
            if node is None:
                break
            path.append(node)
        return path

    def insert(self, realm: Realm, node: Node | None, tokens: tuple[int, ...], block: int) -> Node | None:
        """Enter `block` below `node`; None when another block has the same tokens there: the tree keeps the first."""
        if node is None and (node := self._roots.get(realm)) is None:
            node = self._roots[realm] = Root(realm)
        if tokens in node.children:
            return None
        child = node.children[tokens] = self._nodes[block] = Node(block, tokens, node)
        return child

    def remove(self, block: int) -> None:
        node = self._nodes.pop(block)
        assert not node.children, f"block {block} is evicted before the blocks that follow it"
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if isinstance(parent, Root) and not parent.children:
            del self._roots[parent.realm]

    def walk(self) -> Iterator[Node]:
        stack: list[Node] = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not isinstance(node, Root):
                yield node

    def check(self) -> None:
        assert all(root.children for root in self._roots.values()), "a realm without blocks is kept"
        nodes = {node.block: node for node in self.walk()}
        assert nodes == self._nodes, "the tree and its index of blocks disagree"
        for node in nodes.values():
            assert len(node.tokens) == self.block_size, f"block {node.block} is in the tree and not full"
