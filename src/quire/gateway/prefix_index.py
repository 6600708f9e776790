"""Which worker has seen which prompt prefixes: an approximation from the requests that were sent there.

An index fed by the engines' own events has the same methods."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

BLOCK_BYTES = 256  # of a prompt as JSON: about 64 tokens
MAX_PROMPT_BLOCKS = 512  # of one prompt; what comes behind them does not count


class KnownPrefixes(Protocol):
    def longest(self, blocks: Sequence[int], workers: int) -> tuple[int, int]:
        """-> (how many of the first blocks are known, a bit for each worker of `workers` that knows all of these)"""

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
    """A set of workers for each block, as bits; the least recently sent blocks are forgotten first.

    Invariant: a worker that knows a block knows all blocks before it."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._workers: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def longest(self, blocks: Sequence[int], workers: int) -> tuple[int, int]:
        depth, beyond, knowing = 0, len(blocks) + 1, 0
        while beyond - depth > 1:  # the first `depth` are known, the first `beyond` are not
            middle = (depth + beyond) // 2
            if found := self._workers.get(blocks[middle - 1], 0) & workers:
                depth, knowing = middle, found
            else:
                beyond = middle
        return depth, knowing

    def insert(self, blocks: Sequence[int], worker: int) -> None:
        bit = 1 << worker
        for block in reversed(blocks):  # the tail is forgotten first: a prefix outlives what follows it
            self._workers[block] = self._workers.get(block, 0) | bit
            self._workers.move_to_end(block)
        while len(self._workers) > self._max_blocks:
            self._workers.popitem(last=False)

    def forget(self, worker: int) -> None:
        """It was restarted, or removed: its cache is empty."""
        kept = ~(1 << worker)
        left = [(block, workers & kept) for block, workers in self._workers.items()]
        self._workers = OrderedDict((block, workers) for block, workers in left if workers)
