"""A store of KV blocks in memory."""

import random
from collections.abc import Iterable, Sequence

from quire.core.block_keys import TENANT_BYTES, BlockKey
from quire.core.plan import Fetch, StepPlan
from quire.core.records import TierStats
from quire.core.scheduler import Scheduler


class FakeStore:
    """A `BlockStore` in memory. Saves and fetches take some steps; some fail, and some are forgotten meanwhile.

    A host block must not change while it is saved, and a key stands for the same content whenever it is saved."""

    def __init__(self, seed: int = 0, *, max_delay: int = 3, failures: float = 0.0) -> None:
        self.blocks: dict[BlockKey, list[int | None]] = {}
        self.seconds = 0.0  # what `read_seconds` says
        self.cost = 0.0  # what `save_seconds` says
        self.hangs = False  # whether saves and fetches never end
        self.num_read = 0
        self.touched: list[BlockKey] = []
        self._rng = random.Random(seed)
        self._max_delay, self._failures = max_delay, failures
        self._contents: dict[BlockKey, list[int | None]] = {}  # of all keys ever saved
        self._saves: list[tuple[int, int, BlockKey, list[int | None]]] = []  # (steps left, host block, key, content)
        self._fetches: list[tuple[int, Fetch]] = []  # (steps left, fetch)

    @property
    def is_idle(self) -> bool:
        return not self._saves and not self._fetches

    def find(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        stored = []
        for key in keys:
            if key not in self.blocks:
                break
            stored.append(key)
        return stored

    def read_seconds(self, num_blocks: int) -> float:
        return self.seconds

    def save_seconds(self) -> float:
        return self.cost

    def touch(self, keys: Sequence[BlockKey]) -> None:
        assert all(key in self.blocks for key in keys), "what is not there is touched"
        self.touched += keys

    def clear(self, tenant: bytes) -> None:
        self.blocks = {key: content for key, content in self.blocks.items() if key[:TENANT_BYTES] != tenant}

    def stats(self) -> TierStats:
        return TierStats(stored_bytes=len(self.blocks))

    def begin(self, plan: StepPlan, host: list[list[int | None]]) -> None:
        for block, key in plan.saves:
            assert self._contents.setdefault(key, host[block][:]) == host[block], "one key stands for two contents"
            self._saves.append((self._rng.randint(0, self._max_delay), block, key, host[block][:]))
        for fetch in plan.fetches:
            for _, block in fetch.blocks:
                host[block] = [None] * len(host[block])
            self._fetches.append((self._rng.randint(0, self._max_delay), fetch))

    def advance(self, scheduler: Scheduler, host: list[list[int | None]]) -> None:
        """One step passes: report what has ended."""
        if self.hangs or scheduler.tiers is None:
            return
        saves, fetches, self._saves, self._fetches = self._saves, self._fetches, [], []
        for left, block, key, content in saves:
            assert host[block] == content, "a host block changes while it is saved"
            if left:
                self._saves.append((left - 1, block, key, content))
                continue
            if self._rng.random() >= self._failures:
                self.blocks[key] = content
            scheduler.tiers.saved(block)
        for left, fetch in fetches:
            if left:
                self._fetches.append((left - 1, fetch))
            else:
                scheduler.tiers.fetched(fetch.id, self._read(fetch, host))

    def _read(self, fetch: Fetch, host: list[list[int | None]]) -> int:
        for number, (key, block) in enumerate(fetch.blocks):
            if key not in self.blocks or self._rng.random() < self._failures:
                self.blocks.pop(key, None)
                return number
            host[block] = self.blocks[key][:]
            self.num_read += 1
        return len(fetch.blocks)
