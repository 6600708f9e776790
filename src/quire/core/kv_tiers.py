"""Prefix blocks beyond the pool: on the host, from where they are swapped in, and on disk, from where they are fetched.

A block is saved once it is full: the next plan swaps it out to a host block, and the store writes it to the disk
outside of the step. What the pool evicts later is still there. A waiting sequence whose next blocks are on disk waits
for them if reading is quicker than computing. They arrive in host blocks, and it is admitted like one that was swapped
out."""

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Protocol

from quire.core.block_keys import BlockKey, child_key, root_key, tenant_digest
from quire.core.block_pool import BlockPool
from quire.core.host_index import HostIndex
from quire.core.kv_events import DISK, KVEvents
from quire.core.plan import Fetch, StepPlan
from quire.core.prefix_tree import Namespace, PrefixNode, PrefixTree
from quire.core.records import TierStats
from quire.core.sequence import Sequence

MAX_FETCHES = 2  # of one sequence: what precedes the fetched blocks may be evicted from the pool meanwhile
PREFILL_MEMORY = 2048  # tokens after which a step with prompts counts half in the measured rate
MIN_PREFILL_TOKENS = 64  # fewer tell the time of a step, and not that of a token
FIRST_SAVING_SECONDS = 0.2  # that saving may take beside steps, when the engine starts
SAVING_SHARE = 0.005  # of the time of steps that it may take besides
PAID_SHARE = 0.5  # of the time that hits have saved that it may take besides
MAX_SAVES = 512  # in one plan with a step: all that the largest steps fill
MAX_IDLE_SAVES = 64  # in one without: the engine looks at messages between plans
MIN_FETCH_SECONDS = 0.05  # a fetch is not given up earlier
TOUCH_SECONDS = 600.0  # after which a prefix that is used in the pool is marked as used on disk, too
FIRST_FETCH_SECONDS = 2.0  # nor before this while no prompt has been computed, whose time it could be compared with


class BlockStore(Protocol):
    """Blocks on disk. It carries out the saves and fetches of plans in threads of its own."""

    def find(self, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """The first of these keys, up to one whose block is not stored. It takes microseconds a key."""

    def read_seconds(self, num_blocks: int) -> float:
        """How long a fetch that begins now would take."""

    def save_seconds(self) -> float:
        """How much longer steps take because one block is saved beside them; 0: no longer."""

    def touch(self, keys: Many[BlockKey]) -> None:
        """Blocks, one behind the other, are used in the pool: others are to be removed first."""

    def clear(self, tenant: bytes) -> None:
        """Forget the blocks of a tenant, given its digest."""

    def stats(self) -> TierStats:
        """All but hits and seconds saved."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    keep: bool  # saved blocks stay on the host, the least recently used go first
    block_bytes: int
    write_through: bool  # blocks are saved as they fill, also where that slows steps down


@dataclass(slots=True)
class FetchInFlight:
    fetch: Fetch
    seq: Sequence
    first: int  # index in the block table of the first fetched block
    num_tokens: int  # leading tokens that are computed when all has arrived
    num_gained: int  # of these, tokens that would be computed without it
    began: float
    deadline: float


class KVTiers:
    """Which blocks are saved, fetched and found beyond the pool. All host blocks it names are references it holds."""

    def __init__(
        self,
        tree: PrefixTree,
        host: BlockPool,
        index: HostIndex,
        store: BlockStore | None,
        options: TierOptions,
    ) -> None:
        self._keep, self._block_bytes, self._write_through = options.keep, options.block_bytes, options.write_through
        self._tree, self._host, self._index, self._store = tree, host, index, store
        self.adapters: dict[str, str] = {}  # LoRA adapter -> a digest of it
        self._prefill_tokens = self._prefill_seconds = 0.0  # of steps with prompts; earlier ones count less
        self._uncounted: list[tuple[TierStats, int, float]] = []  # hits before that: tokens, and seconds of waiting
        self._host_stats, self._disk_stats = TierStats(), TierStats()  # of the disk: what the store does not count
        self.now = 0.0  # time.monotonic() of the last `expire`
        self._unsaved: dict[int, PrefixNode] = {}  # by block; an evicted node no longer has its block
        self._saving: dict[int, PrefixNode] = {}  # by the host block that the store writes
        self._listener: KVEvents | None = None
        self._saving_seconds = FIRST_SAVING_SECONDS  # that saving may still take beside steps
        self._fetches: dict[int, FetchInFlight] = {}
        self._fetched_keys: Counter[BlockKey] = Counter()  # of fetches that a sequence waits for
        self._ids = count()
        tree.root_key = self._root_key

    def _root_key(self, namespace: Namespace) -> BlockKey:
        tenant, salt, adapter = namespace
        return root_key(tenant, salt, self.adapters.get(adapter, adapter))

    # ---- pool to host and disk

    def note_full(self, block: int, node: PrefixNode) -> None:
        """The planned step fills a block that is not known to be saved."""
        if node.key:
            if self._unsaved.pop(block, node) is not node:
                self._disk_stats.skipped_blocks += 1  # what the block had before was evicted
            self._unsaved[block] = node
            node.touched = self.now

    @property
    def has_unsaved(self) -> bool:
        """Whether the next plan saves something."""
        return bool(self._unsaved) and self._can_save

    @property
    def waits_to_save(self) -> bool:
        """Whether blocks will be saved when the disk has caught up."""
        return bool(self._unsaved) and bool(self._saving)

    @property
    def _can_save(self) -> bool:
        return self._host.num_available > self._host.num_blocks // 2  # the others are for fetches

    def save(self, plan: StepPlan, is_idle: bool) -> None:
        """Swap out what earlier plans have filled, while host blocks are free. It stays in the pool, too.

        Where saving slows steps down, it may take a small share of their time, and more once hits have paid for it.
        What is left waits until the engine is idle, or until it is evicted. Written through, blocks wait for host
        blocks alone, which the store gives back as it writes."""
        cost = self._save_seconds(is_idle)
        most = MAX_IDLE_SAVES if is_idle else MAX_SAVES
        while self._unsaved and self._can_save and len(plan.swap_out) < most and (self._saving_seconds > 0 or not cost):
            self._saving_seconds -= cost
            block = next(iter(self._unsaved))
            node = self._unsaved.pop(block)
            if node.block != block:
                self._disk_stats.skipped_blocks += 1  # the node was evicted
                continue
            if self._index.find(node.key) is not None:
                continue  # the block is on the host already
            host = self._host.take()
            plan.swap_out.append((block, host))
            if self._keep:
                self._index.insert(node.key, host, node.hash)
                self._host_stats.written_bytes += self._block_bytes
            if self._store is not None:
                self._host.hold(host)
                self._saving[host] = node
                plan.saves.append((host, node.key))

    def _save_seconds(self, is_idle: bool) -> float:
        """Seconds by which saving a block makes steps longer; 0 where blocks are saved whatever it takes."""
        is_limited = self._store is not None and not is_idle and not self._write_through
        return self._store.save_seconds() if self._store is not None and is_limited else 0.0

    def saved(self, host: int) -> None:
        """The store has written a host block, or has failed to."""
        node = self._saving.pop(host)
        self._host.release([host])
        if self._listener is not None and self._is_on_disk(node.key):
            self._listener.kept(node.hash, DISK)

    def tell(self, listener: KVEvents) -> None:
        """Tell of every block that comes to a tier or leaves it."""
        self._listener = self._index.listener = listener
        listener.is_on_disk = self._is_on_disk

    def _is_on_disk(self, key: BlockKey) -> bool:
        return self._store is not None and bool(self._store.find([key]))

    # ---- host to pool

    def touch(self, path: Many[PrefixNode]) -> None:
        """What is used in the pool is not the next to be evicted from the host, or removed from the disk."""
        if self._keep:
            for node in path:
                if (host := self._index.find(node.key)) is not None:
                    self._host.touch(host)
        if self._store is not None:
            self._touch_stored([node for node in path if node.key and self.now >= node.touched + TOUCH_SECONDS])

    def _touch_stored(self, path: Many[PrefixNode]) -> None:
        """A prefix that never leaves the pool is not read from the disk: it would be the oldest there, and those that
        continue it could not be used after a restart. What is not there any more is saved again."""
        assert self._store is not None
        num_stored = len(self._store.find(node.key for node in path)) if path else 0
        if num_stored:
            self._store.touch([node.key for node in path[:num_stored]])
        for number, node in enumerate(path):
            node.touched = self.now
            if number >= num_stored:
                self.note_full(node.block, node)

    def hold_host_hits(self, seq: Sequence, start: int) -> None:
        """Hold the host blocks that continue the first `start` blocks of a waiting sequence, which are in the pool."""
        if self._keep and not seq.host_blocks and seq.group.takes_arrived_blocks(seq):
            held, _ = self._hold_leading(self._keys(seq, seq.node if start else None, start))
            seq.host_blocks = dict(enumerate(held, start))
            seq.num_arrived = (start + len(held)) * self._tree.block_size if held else 0

    def _hold_leading(self, keys: Iterator[BlockKey]) -> tuple[list[int], BlockKey]:
        """Hold the host blocks of the first keys. -> these, and the first key that is not on the host, or b"" """
        held: list[int] = []
        for key in keys:
            if (host := self._index.find(key)) is None:
                return held, key
            self._host.hold(host)
            held.append(host)
        return held, b""

    def _keys(self, seq: Sequence, node: PrefixNode | None, start: int) -> Iterator[BlockKey]:
        """The keys of the full blocks of `seq` from `start` on, behind `node`, but for one with its last token."""
        size = self._tree.block_size
        key = node.key if node else self._root_key(seq.group.namespace)
        for i in range(start, (len(seq.tokens) - 1) // size if key else 0):
            key = child_key(key, tuple(seq.tokens[i * size : (i + 1) * size]))
            yield key

    # ---- disk to host

    def awaits_blocks(self, seq: Sequence, plan: StepPlan) -> bool:
        """Whether a waiting sequence waits for blocks from the disk. Begins to fetch them if that pays."""
        if self._store is None or seq.fetch is not None:
            return seq.fetch is not None
        can_ask = seq.num_fetches < MAX_FETCHES and seq.group.takes_arrived_blocks(seq)
        if seq.num_computed or not (can_ask or seq.num_arrived):
            return False
        last = (len(seq.tokens) - 1) // self._tree.block_size
        path = self._tree.match(seq.group.namespace, None, seq.tokens, 0, last)
        if seq.num_arrived:
            if self._is_continued(seq, path) and not seq.group.computes_prompt_logprobs(seq):
                return False  # the blocks have arrived
            self.drop_arrived(seq)
        return can_ask and self._begin_fetch(seq, path, plan)

    def _is_continued(self, seq: Sequence, path: Many[PrefixNode]) -> bool:
        """Whether the pool still has what precedes the blocks that arrived for `seq`."""
        return len(path) >= seq.first_arrived(self._tree.block_size)

    def _begin_fetch(self, seq: Sequence, path: Many[PrefixNode], plan: StepPlan) -> bool:
        """Fetch what follows the blocks of `path` in the pool and further blocks on the host, if that pays."""
        assert self._store is not None
        start = len(path)
        keys = self._keys(seq, path[-1] if path else None, start)
        held, key = self._hold_leading(keys)
        if key in self._fetched_keys:
            self._host.release(held)
            return True  # another sequence fetches it, and will share it
        stored = self._store.find(chain([key], keys)) if key else []
        return self._plan_fetch(seq, path, held, stored, plan)

    def _plan_fetch(
        self, seq: Sequence, path: Many[PrefixNode], held: list[int], stored: list[BlockKey], plan: StepPlan
    ) -> bool:
        """`held`: host blocks behind `path`; `stored`: keys of blocks on disk behind these."""
        assert self._store is not None
        if len(stored) > self._host.num_available and self._fetched_keys:
            self._host.release(held)
            return True  # other fetches will end and give host blocks back
        del stored[self._host.num_available :]
        seconds = self._seconds_to_compute(len(stored) + self._fetched_keys.total())
        if not stored or (seconds and self._store.read_seconds(len(stored)) > seconds):
            self._host.release(held)
            seq.num_fetches = MAX_FETCHES
            return False
        seq.host_blocks = dict(enumerate(held, len(path)))
        size, depth = self._tree.block_size, len(path) + len(held) + len(stored)
        self._fetch(seq, [(key, self._host.take()) for key in stored], plan, depth * size, len(stored) * size, seconds)
        return True

    def _fetch(
        self, seq: Sequence, blocks: list[tuple[BlockKey, int]], plan: StepPlan, num_tokens: int, num_gained: int,
        seconds: float,
    ) -> None:  # fmt: skip
        """Let `seq` wait for `blocks`, which follow those that it holds on the host. `seconds`: to compute them."""
        fetch = seq.fetch = Fetch(next(self._ids), blocks)
        seq.num_fetches += 1
        plan.fetches.append(fetch)
        deadline = self.now + (max(seconds, MIN_FETCH_SECONDS) if seconds else FIRST_FETCH_SECONDS)
        first = num_tokens // self._tree.block_size - len(self._blocks_of(fetch))
        self._fetches[fetch.id] = FetchInFlight(fetch, seq, first, num_tokens, num_gained, self.now, deadline)
        self._fetched_keys.update(key for key, _ in blocks)

    def _blocks_of(self, fetch: Fetch) -> list[int]:
        """The host blocks of a fetch; a host slot, which has a number behind theirs, is left out."""
        return [host for _, host in fetch.blocks if host < self._host.num_blocks]

    def _release_host(self, ids: list[int]) -> None:
        self._host.release(ids)

    def _seconds_to_compute(self, num_blocks: float) -> float:
        """0: not measured yet."""
        if self._prefill_tokens < MIN_PREFILL_TOKENS:
            return 0.0
        return num_blocks * self._tree.block_size * self._prefill_seconds / self._prefill_tokens

    def fetched(self, fetch_id: int, num_blocks: int) -> None:
        """The store has read the first `num_blocks` of a fetch; it could not read the next."""
        arrived = self._fetches.pop(fetch_id)
        blocks = [host for _, host in arrived.fetch.blocks]
        if arrived.seq.fetch is not arrived.fetch:  # the fetch was given up, or the sequence has ended
            self._release_host(blocks)
            return
        self._end_wait(arrived, blocks[:num_blocks])
        self._release_host(blocks[num_blocks:])

    def expire(self, now: float) -> None:
        """Let sequences go on that wait for the disk longer than computing takes."""
        self.now = now
        for late in [each for each in self._fetches.values() if each.deadline <= now]:
            if late.seq.fetch is late.fetch:
                self._end_wait(late, [])

    def _end_wait(self, ended: FetchInFlight, blocks: list[int]) -> None:
        seq, missing = ended.seq, len(ended.fetch.blocks) - len(blocks)
        seq.fetch = None
        self._fetched_keys -= Counter(key for key, _ in ended.fetch.blocks)
        if missing:
            seq.num_fetches = MAX_FETCHES  # the rest is computed
        seq.fetch_seconds = self.now - ended.began
        self._take_arrived(ended, blocks, missing)

    def _take_arrived(self, ended: FetchInFlight, blocks: list[int], missing: int) -> None:
        """Let the sequence have the host blocks of its fetch, of which the last `missing` could not be read."""
        seq, num_missing = ended.seq, missing * self._tree.block_size
        seq.host_blocks |= dict(enumerate(blocks, ended.first))
        seq.num_arrived = ended.num_tokens - num_missing if seq.host_blocks else 0
        seq.num_fetched = ended.num_gained - num_missing

    def drop_arrived(self, seq: Sequence) -> None:
        """Give back host blocks that arrived for a waiting sequence."""
        self._host.release(list(seq.host_blocks.values()))
        seq.host_blocks, seq.num_arrived, seq.num_fetched = {}, 0, 0

    def forget_fetch(self, seq: Sequence) -> None:
        """The sequence has ended. The host blocks of its fetch are released when the store is done with them."""
        assert seq.fetch is not None
        self._fetched_keys -= Counter(key for key, _ in seq.fetch.blocks)
        seq.fetch = None

    @property
    def has_waiting(self) -> bool:
        """Whether sequences wait for the disk."""
        return bool(self._fetched_keys)

    # ---- seen from outside

    def count_hits(self, seq: Sequence) -> None:
        """Count what an admitted sequence takes from the tiers."""
        num_tokens = self._num_hits(seq)
        from_disk = min(seq.num_fetched, num_tokens)
        from_host = num_tokens - from_disk
        self._disk_stats.hits += from_disk
        self._host_stats.hits += from_host
        self._host_stats.read_bytes += from_host // self._tree.block_size * self._block_bytes
        self._uncounted += [(self._disk_stats, from_disk, seq.fetch_seconds), (self._host_stats, from_host, 0.0)]
        self._count_seconds()

    def _num_hits(self, seq: Sequence) -> int:
        """Tokens of an admitted sequence that were not in the pool."""
        return max(seq.num_arrived - len(seq.block_table) * self._tree.block_size, 0)

    def record_step(self, seconds: float) -> None:
        """A step took so long: a share of that may go into saving."""
        self._saving_seconds += SAVING_SHARE * seconds

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Learn how fast prompts are computed from a step with prompts: fetches are compared with it."""
        kept = 0.5 ** (num_tokens / PREFILL_MEMORY)
        self._prefill_tokens = self._prefill_tokens * kept + num_tokens
        self._prefill_seconds = self._prefill_seconds * kept + seconds
        if self._uncounted:
            self._count_seconds()

    def _count_seconds(self) -> None:
        if self._seconds_to_compute(1):
            for stats, num_tokens, waited in self._uncounted:
                seconds = self._seconds_to_compute(num_tokens / self._tree.block_size)
                stats.seconds_saved += max(seconds - waited, 0.0)
                self._saving_seconds += PAID_SHARE * max(seconds - waited, 0.0)
            self._uncounted.clear()

    def stats(self) -> dict[str, TierStats]:
        """Statistics by tier: "host" and "disk", where these exist."""
        stats = {}
        if self._keep:
            stats["host"] = replace(self._host_stats, stored_bytes=len(self._index) * self._block_bytes)
        if self._store is not None:
            stored, disk = self._store.stats(), self._disk_stats
            skipped = stored.skipped_blocks + disk.skipped_blocks
            stats["disk"] = replace(stored, hits=disk.hits, seconds_saved=disk.seconds_saved, skipped_blocks=skipped)
        return stats

    def clear(self, tenant: str) -> None:
        self._host.drop_cached(tenant)
        if self._store is not None:
            self._store.clear(tenant_digest(tenant))
        if self._listener is not None:
            self._listener.disk_cleared()

    def check(self) -> Counter[int]:
        """Assert every invariant. -> the references it holds to host blocks, and to host slots behind them"""
        refs = Counter(self._saving.keys())
        for each in self._fetches.values():
            refs.update(host for _, host in each.fetch.blocks)
        waiting = [each for each in self._fetches.values() if each.seq.fetch is each.fetch]
        keys = Counter(key for each in waiting for key, _ in each.fetch.blocks)
        assert self._fetched_keys == keys, "a key that no sequence waits for counts as fetched, or the other way round"
        return refs
