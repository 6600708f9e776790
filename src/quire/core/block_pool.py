"""Which KV blocks are held, and which free ones still hold a prefix. Block ids only: no tensors."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Protocol

from quire.core.prefix_tree import PrefixNode


class BlockIndex(Protocol):
    """What finds the prefixes that blocks hold: the prefix tree on the device, keys on the host."""

    has_gaps: bool

    def __contains__(self, block: int) -> bool: ...

    def remove(self, block: int) -> None: ...

    def belongs_to(self, block: int, tenant: str) -> bool: ...

    def walk(self) -> Iterator[PrefixNode]: ...


@lru_cache(4)
def _block_ids(num_blocks: int) -> list[int]:
    """The pools of a simulated fleet share the numbers: a list of its own would take five times the memory."""
    return list(range(num_blocks - 1, -1, -1))


class BlockPool:
    """Blocks 0 .. num_blocks, counted by reference.

    Invariant (`check()`): every block is held (refs > 0), or free, or free and cached; exactly one of the three."""

    def __init__(self, num_blocks: int, tree: BlockIndex) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.tree = tree
        self._free = _block_ids(num_blocks)[:]  # without a prefix; the last is taken first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, in the tree; least recently used first

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def cached(self) -> Iterable[int]:
        """Free blocks that hold a prefix, the least recently used first."""
        return self._cached

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    def touch(self, block: int) -> None:
        """Make a free cached block the most recently used one."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def evict_first(self, block: int) -> None:
        """Make a free cached block the least recently used one."""
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def take(self) -> int:
        """A free block. If all free blocks are cached, the least recently used one is evicted."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._cached, "a block is taken from an empty pool"
            block, _ = self._cached.popitem(last=False)
            self.tree.remove(block)
        self.refs[block] = 1
        return block

    def grow(self, table: list[int], num_blocks: int) -> bool:
        """Extend `table` to `num_blocks` blocks, or take nothing and return False."""
        num_missing = num_blocks - len(table)
        if num_missing > self.num_available:
            return False
        free, cached, evict = self._free, self._cached, self.tree.remove
        for _ in range(num_missing):  # as `take` does, without a call for each
            if free:
                block = free.pop()
            else:
                block, _ = cached.popitem(last=False)
                evict(block)
            self.refs[block] = 1
            table.append(block)
        return True

    def hold(self, block: int) -> None:
        """One more reference to a block that is held or cached."""
        if self.refs[block] == 0:
            del self._cached[block]
        self.refs[block] += 1

    def release(self, table: list[int]) -> None:
        refs, tree = self.refs, self.tree
        for block in reversed(table):  # the tail first: a prefix outlives its suffix
            left = refs[block] - 1
            assert left >= 0, f"block {block} is released more often than held"
            refs[block] = left
            if left == 0:
                if block in tree:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def forget(self, block: int) -> None:
        """The index has lost the prefix of a block: it is free like any other, unless it is held."""
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def drop_cached(self, tenant: str) -> None:
        """Forget the prefixes of a tenant that no sequence holds."""
        for block in list(self._cached):  # the least recently used first: a suffix before its prefix
            if self.tree.belongs_to(block, tenant):
                del self._cached[block]
                self.tree.remove(block)
                self._free.append(block)

    def check(self) -> None:
        held = [block for block, refs in enumerate(self.refs) if refs > 0]
        every = sorted([*held, *self._free, *self._cached])
        assert every == list(range(self.num_blocks)), "a block is lost, or both held and free"
        assert all(block in self.tree for block in self._cached), "a cached block is not in the tree"
        assert not any(block in self.tree for block in self._free), "a block is in the tree, and free without a prefix"
        if self.tree.has_gaps:
            return
        order = {block: i for i, block in enumerate(self._cached)}
        for node in self.tree.walk():
            for child in node.children.values():
                if node.block in order:
                    assert order.get(child.block, self.num_blocks) < order[node.block], (
                        f"block {child.block} follows block {node.block} and would be evicted after it"
                    )
