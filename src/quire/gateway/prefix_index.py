"""Which worker has seen which prompt prefixes: an approximation from the requests that were sent there.

An index fed by the engines' own events has the same methods."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

BLOCK_BYTES = 256  # of a prompt as JSON: about 64 tokens
FOLLOWER_BITS = 8
MAX_FOLLOWERS = (1 << FOLLOWER_BITS) - 1
FOLLOWERS_OF_SHARED = 3  # a block that so many different blocks follow is where conversations part
MAX_PROMPT_BLOCKS = 512  # of one prompt; what comes behind them does not count


class KnownPrefixes(Protocol):
    def longest(self, blocks: Sequence[int], workers: int) -> tuple[int, int]:
        """-> (how many of the first blocks are known, a bit for each worker of `workers` that knows all of these)"""

    def num_shared(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks, which are known, several conversations have in common: instructions, mostly."""

    def insert(self, blocks: Sequence[int], worker: int) -> None: ...

    def forget(self, worker: int) -> None: ...


def prompt_blocks(namespace: str, prompt: bytes) -> list[int]:
    """A hash for each whole block, of it and all before it."""
    state, blocks = hash(namespace), []
    for start in range(0, min(len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES * MAX_PROMPT_BLOCKS), BLOCK_BYTES):
        state = hash((state, prompt[start : start + BLOCK_BYTES]))
        blocks.append(state)
    return blocks


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

    def insert(self, blocks: Sequence[int], worker: int) -> None:
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
        """It was restarted, or removed: its cache is empty."""
        kept = ~(1 << worker + FOLLOWER_BITS)
        left = [(block, value & kept) for block, value in self._known.items()]
        self._known = OrderedDict((block, value) for block, value in left if value >> FOLLOWER_BITS)
