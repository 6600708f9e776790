"""Which worker holds which KV blocks, in its pool or in a tier below it, exactly as the workers' events say."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from quire.core.kv_events import block_hashes, root_hash
from quire.gateway.kv_batches import AllBlocksCleared, BlockEvent, BlockName, BlockRemoved, BlocksKept, BlockStored

log = logging.getLogger("quire.gateway")

MAX_MASKS = 1 << 16  # sets of workers that are kept to be shared
POOL_BIT = 1
MAX_TIERS = 8  # of all workers; further ones count as the last


class KVIndex:
    """A block is named by a hash of its namespace and of all tokens up to its end, whatever its engine calls it.

    A worker is a bit. Invariant: a block has the bit of a worker exactly if the worker has a name for it; it has the
    bit in `demoted`, too, exactly if it is in tiers of the worker and not in its pool."""

    def __init__(self, max_blocks: int) -> None:
        """`max_blocks`: of one worker. What it stores beyond that is not indexed."""
        self._max_blocks = max_blocks
        self.holders: dict[int, int] = {}  # block -> a bit for each worker
        self._masks: dict[int, int] = {}  # so that equal sets of workers are one object
        self._names: dict[int, dict[BlockName, int]] = {}  # worker -> its name of a block -> block
        self._places: dict[int, dict[BlockName, int]] = {}  # worker -> name -> a bit each for pool and tiers;
        # blocks that are in the pool alone, as most are, have no entry
        self._tier_bits: dict[str, int] = {"": POOL_BIT}
        self.demoted: dict[int, int] = {}  # block -> a bit for each worker whose pool does not hold it
        self.block_sizes: dict[int, int] = {}  # by worker
        self.followed = 0  # a bit for each worker whose events come

    def follow(self, worker: int) -> None:
        self.followed |= 1 << worker
        self._names.setdefault(worker, {})

    def num_blocks(self, worker: int) -> int:
        return len(self._names.get(worker, ()))

    def blocks(self, worker: int) -> set[int]:
        return set(self._names.get(worker, {}).values())

    def longest(self, blocks: Sequence[int], workers: int) -> tuple[int, int]:
        """The longest known prefix, as in `KnownPrefixes`. Engines evict the last blocks of a prefix first, so
        bisection finds its end."""
        known, depth, beyond, holding = self.holders, 0, len(blocks) + 1, 0
        while beyond - depth > 1:
            middle = (depth + beyond) // 2
            if having := known.get(blocks[middle - 1], 0) & workers:
                depth, holding = middle, having
            else:
                beyond = middle
        return depth, holding

    # -- events

    def apply(self, worker: int, events: Iterable[BlockEvent], own_key: str = "") -> None:
        """`own_key`: the namespace key that all requests of the gateway have at this worker."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(worker, event, own_key)
                case BlocksKept():
                    self._keep(worker, event)
                case BlockRemoved():
                    self._remove(worker, event)
                case AllBlocksCleared():
                    self.clear(worker)

    def _store(self, worker: int, event: BlockStored, own_key: str) -> None:
        names, bit = self._names.setdefault(worker, {}), 1 << worker
        tier = self._tier_bit(event.tier)
        self._note_size(worker, event.block_size)
        for name, block in zip(event.names, self._blocks(names, event, own_key), strict=True):
            if (old := names.get(name)) is None and len(names) >= self._max_blocks:
                return
            if old is not None and old != block:
                self._drop(worker, old)
            if tier != POOL_BIT or name in self._places.get(worker, ()):
                place = self._place(worker, name) if old == block else 0
                self._set_place(worker, name, block, place | tier)
            names[name] = block
            self._hold(block, self.holders.get(block, 0) | bit)

    def _keep(self, worker: int, event: BlocksKept) -> None:
        names, tier = self._names.get(worker, {}), self._tier_bit(event.tier)
        for name in event.names:
            if (block := names.get(name)) is not None:
                self._set_place(worker, name, block, self._place(worker, name) | tier)

    def _tier_bit(self, tier: str) -> int:
        if tier not in self._tier_bits and len(self._tier_bits) > MAX_TIERS:
            return 1 << MAX_TIERS
        return self._tier_bits.setdefault(tier, 1 << len(self._tier_bits))

    def _place(self, worker: int, name: BlockName) -> int:
        """The tiers, as bits, in which a worker has the block of this name."""
        return self._places.get(worker, {}).get(name, POOL_BIT if name in self._names.get(worker, ()) else 0)

    def _set_place(self, worker: int, name: BlockName, block: int, place: int) -> None:
        if place == POOL_BIT:
            self._places.get(worker, {}).pop(name, None)
        else:
            self._places.setdefault(worker, {})[name] = place
        demoted = self.demoted.get(block, 0)
        demoted = demoted & ~(1 << worker) if place & POOL_BIT else demoted | 1 << worker
        if demoted:
            self.demoted[block] = demoted
        else:
            self.demoted.pop(block, None)

    def _blocks(self, names: dict[BlockName, int], event: BlockStored, own_key: str) -> list[int]:
        extra_keys, size = event.extra_keys, event.block_size
        if event.parent is None:
            parent, extra_keys = _root(extra_keys[0], own_key), [[], *extra_keys[1:]]
        else:
            parent = self._known_as(names, event.parent)
        if not any(extra_keys):
            return block_hashes(parent, event.tokens, size)
        blocks = []
        for place, extra in enumerate(extra_keys):  # such as the images that placeholders stand for
            before = root_hash([str(parent), *map(repr, extra)]) if extra else parent
            parent = block_hashes(before, event.tokens[place * size : (place + 1) * size], size)[0]
            blocks.append(parent)
        return blocks

    def _known_as(self, names: dict[BlockName, int], name: BlockName) -> int:
        """What follows a block that is not known is found by no request, but it is removed again by its name."""
        if (block := names.get(name)) is not None:
            return block
        return name if isinstance(name, int) and 0 <= name < 1 << 64 else root_hash([f"unknown:{name!r}"])

    def _remove(self, worker: int, event: BlockRemoved) -> None:
        names, tier = self._names.get(worker, {}), self._tier_bit(event.tier)
        for name in event.names:
            if (block := names.get(name)) is None:
                continue
            if left := self._place(worker, name) & ~tier:
                self._set_place(worker, name, block, left)
            else:
                del names[name]
                self._places.get(worker, {}).pop(name, None)
                self._drop(worker, block)

    def _drop(self, worker: int, block: int) -> None:
        for held in (self.holders, self.demoted):
            left = held.get(block, 0) & ~(1 << worker)
            if not left:
                held.pop(block, None)
            elif held is self.holders:
                self._hold(block, left)
            else:
                held[block] = left

    def _hold(self, block: int, workers: int) -> None:
        if len(self._masks) > MAX_MASKS:
            self._masks.clear()
        self.holders[block] = self._masks.setdefault(workers, workers)

    def clear(self, worker: int) -> None:
        """A worker's cache was cleared; its events go on."""
        names = self._names.get(worker)
        if names:
            for block in names.values():
                self._drop(worker, block)
            names.clear()
        self._places.pop(worker, None)

    def forget(self, worker: int) -> None:
        """Forget a worker whose events do not come any more."""
        self.clear(worker)
        self.followed &= ~(1 << worker)
        self._names.pop(worker, None)
        self.block_sizes.pop(worker, None)

    def _note_size(self, worker: int, size: int) -> None:
        if worker not in self.block_sizes and self.block_sizes and size not in self.block_sizes.values():
            log.warning("workers have blocks of %d and of %d tokens", size, next(iter(self.block_sizes.values())))
        self.block_sizes[worker] = size

    def check(self) -> None:
        """Assert the invariant."""
        workers: dict[int, int] = {}
        for worker, names in self._names.items():
            assert len(set(names.values())) == len(names), f"worker {worker} has two names for one block"
            for block in names.values():
                workers[block] = workers.get(block, 0) | 1 << worker
        assert workers == self.holders, "blocks and names disagree"
        demoted: dict[int, int] = {}
        for worker, places in self._places.items():
            for name, place in places.items():
                assert place and place != POOL_BIT, "a block that is in the pool alone, or nowhere, has no place"
                if not place & POOL_BIT:
                    block = self._names[worker][name]
                    demoted[block] = demoted.get(block, 0) | 1 << worker
        assert demoted == self.demoted, "places and demoted blocks disagree"


def _root(keys: list[Any], own_key: str) -> int:
    return root_hash(key if isinstance(key, str) else repr(key) for key in keys if key != own_key)
