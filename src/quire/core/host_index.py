"""Prefix blocks on the host: what the prefix tree is to the blocks of the device."""

from collections.abc import Iterator

from quire.core.block_keys import BlockKey, tenant_digest
from quire.core.prefix_tree import PrefixNode


class HostIndex:
    """The prefix blocks that are kept on the host, by key."""

    has_gaps = True  # a block may be evicted before those that follow it

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: BlockKey) -> int | None:
        return self._blocks.get(key)

    def insert(self, key: BlockKey, block: int) -> None:
        self._blocks[key], self._keys[block] = block, key

    def remove(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]

    def belongs_to(self, block: int, tenant: str) -> bool:
        return self._keys[block].startswith(tenant_digest(tenant))

    def walk(self) -> Iterator[PrefixNode]:
        return iter(())
