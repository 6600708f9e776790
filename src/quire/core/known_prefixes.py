"""Where the prefix of a prompt is cached, among several that could compute it, and which of them takes it.

A worker is whatever answers requests: an engine of a group, or a server behind a gateway. It is a bit in sets."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

FOLLOWER_BITS = 8
MAX_FOLLOWERS = (1 << FOLLOWER_BITS) - 1
FOLLOWERS_OF_SHARED = 3  # a block that so many different blocks follow is where conversations part


class KnownPrefixes(Protocol):
    def longest(self, blocks: Sequence[int], workers: int) -> tuple[int, int]:
        """-> (how many of the first blocks are known, a bit for each worker of `workers` that knows all of these)"""

    def num_shared(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks, which are known, several conversations have in common: instructions, mostly."""

    def insert(self, blocks: Sequence[int], worker: int, num_known: int) -> None:
        """A worker gets a prompt of which it knows the first `num_known` blocks, as `longest` says."""

    def forget(self, worker: int) -> None: ...


class ApproximatePrefixes:
    """A set of workers for each block; the least recently sent blocks are forgotten first.

    Invariant: a worker that knows a block knows all blocks before it."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        # A block -> a bit for each worker, and in the last eight bits how many different blocks have followed it.
        self._known: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def workers(self, block: int) -> int:
        return self._known.get(block, 0) >> FOLLOWER_BITS

    def longest(self, blocks: Sequence[int], workers: int) -> tuple[int, int]:
        depth, beyond, knowing = 0, len(blocks) + 1, 0
        while beyond - depth > 1:  # the first `depth` are known, the first `beyond` are not
            middle = (depth + beyond) // 2
            if found := self.workers(blocks[middle - 1]) & workers:
                depth, knowing = middle, found
            else:
                beyond = middle
        return depth, knowing

    def num_shared(self, blocks: Sequence[int]) -> int:
        for depth in range(len(blocks), 0, -1):
            if self._known.get(blocks[depth - 1], 0) & MAX_FOLLOWERS >= FOLLOWERS_OF_SHARED:
                return depth
        return 0

    def insert(self, blocks: Sequence[int], worker: int, num_known: int = 0) -> None:
        known, bit = self._known, 1 << worker + FOLLOWER_BITS
        follows_new = False
        for block in reversed(blocks):  # the tail is forgotten first: a prefix outlives what follows it
            value = known.get(block)
            is_new = value is None
            value = (value or 0) | bit
            if follows_new and value & MAX_FOLLOWERS < MAX_FOLLOWERS:
                value += 1
            known[block] = value
            known.move_to_end(block)
            follows_new = is_new
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def forget(self, worker: int) -> None:
        """Forget the prefixes of a worker that was restarted or removed: its cache is empty."""
        kept = ~(1 << worker + FOLLOWER_BITS)
        left = [(block, value & kept) for block, value in self._known.items()]
        self._known = OrderedDict((block, value) for block, value in left if value >> FOLLOWER_BITS)


class CacheThresholds(Protocol):
    @property
    def cache_threshold(self) -> float:
        """Share of a prompt that has to be known at a worker."""

    @property
    def balance_abs_threshold(self) -> int:
        """Requests by which a worker may lead the least busy one and still get more for its cache."""

    @property
    def balance_rel_threshold(self) -> float: ...


class PrefixHolder(Protocol):
    """A worker, as far as its cache and its load go."""

    @property
    def mask(self) -> int:
        """The worker's bit in sets of workers."""

    @property
    def load(self) -> float: ...


W = TypeVar("W", bound=PrefixHolder)


def pick_holder(
    known: KnownPrefixes,
    workers: Sequence[W],
    blocks: Sequence[int],
    thresholds: CacheThresholds,
    least_busy: Callable[[Sequence[W]], W],
) -> tuple[W, int] | None:
    """The worker that knows most of a prompt, and how many blocks it knows; None where that is little, or where it is
    much busier than another.

    What many conversations have in common does not count: every worker learns that soon, and if it counted, all of them
    would go to the worker that had it first."""
    masks = [worker.mask for worker in workers]
    num_known, bits = known.longest(blocks, sum(masks))
    num_shared = known.num_shared(blocks[:num_known])
    num_own, num_own_known = len(blocks) - num_shared, num_known - num_shared
    if not num_own_known or num_own_known < thresholds.cache_threshold * num_own:
        return None
    if bits & (bits - 1):  # several
        holder = least_busy([worker for worker in workers if worker.mask & bits])
    else:
        holder = workers[masks.index(bits)]
    return None if _is_too_busy(holder.load, workers, thresholds) else (holder, num_known)


def _is_too_busy(load: float, workers: Sequence[PrefixHolder], thresholds: CacheThresholds) -> bool:
    if load <= thresholds.balance_abs_threshold:
        return False
    least = min([worker.load for worker in workers])
    return load - least > thresholds.balance_abs_threshold and load > thresholds.balance_rel_threshold * least
