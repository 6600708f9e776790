"""Prefix blocks on the host: what the prefix tree is to the blocks of the device."""

from collections.abc import Iterator

from quire.core.block_keys import BlockKey, tenant_digest
from quire.core.kv_events import HOST, KVEvents
from quire.core.prefix_tree import PrefixNode


class HostIndex:
    """The prefix blocks that are kept on the host, by key."""

    has_gaps = True  # a block may be evicted before those that follow it

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._hashes: dict[int, int] = {}  # by block, where events tell of it
        self.listener: KVEvents | None = None

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: BlockKey) -> int | None:
        return self._blocks.get(key)

    def insert(self, key: BlockKey, block: int, hashed: int = 0) -> None:
        """`hashed`: its name in KV events."""
        self._blocks[key], self._keys[block] = block, key
        if self.listener is not None:
            self._hashes[block] = hashed
            self.listener.kept(hashed, HOST)

    def remove(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]
        if self.listener is not None:
            self.listener.lost(self._hashes.pop(block, 0))

    def belongs_to(self, block: int, tenant: str) -> bool:
        return self._keys[block].startswith(tenant_digest(tenant))

    def walk(self) -> Iterator[PrefixNode]:
        return iter(())
