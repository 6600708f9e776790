"""Prompts as blocks, and which worker holds which of them: what its events say, and for workers without events what was
sent there."""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from quire.core.known_prefixes import FOLLOWERS_OF_SHARED, ApproximatePrefixes
from quire.gateway.kv_index import KVIndex

BLOCK_BYTES = 256  # of a prompt as JSON: about 64 tokens
MAX_PROMPT_BLOCKS = 512  # of one prompt; what comes behind them does not count
EXPECTED_SECONDS = 5.0  # that the events of a prompt may take, at least


def prompt_blocks(namespace: str, prompt: bytes) -> list[int]:
    """A hash for each whole block, of it and all before it."""
    state, blocks = hash(namespace), []
    for start in range(0, min(len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES * MAX_PROMPT_BLOCKS), BLOCK_BYTES):
        state = hash((state, prompt[start : start + BLOCK_BYTES]))
        blocks.append(state)
    return blocks


class EventPrefixes:
    """What workers hold, as their events say, and what the others were sent. Blocks are those of KV events.

    A prompt that was sent a moment ago is expected where it was sent: its events are still to come."""

    def __init__(self, index: KVIndex, max_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._index, self._max_blocks, self._clock = index, max_blocks, clock
        self._sent = ApproximatePrefixes(max_blocks)  # to workers without events
        self._expected: dict[int, int] = {}  # block -> a bit for each worker
        self._expected_before: dict[int, int] = {}
        self._since = clock()
        self._followers: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # block -> some that have followed it
        self._shared: set[int] = set()  # blocks that enough have followed

    def longest(self, blocks: Sequence[int], workers: int) -> tuple[int, int]:
        followed = workers & self._index.followed
        held, bits = self._longest_held(blocks, followed)
        if followed == workers or not len(self._sent):
            return held, bits
        sent, sent_bits = self._sent.longest(blocks, workers & ~followed)
        if sent == held:
            return held, bits | sent_bits
        return (sent, sent_bits) if sent > held else (held, bits)

    def _longest_held(self, blocks: Sequence[int], workers: int) -> tuple[int, int]:
        """Engines evict the last blocks of a prefix first, and what is expected follows what is held: a worker that has
        a block has all before it."""
        held, new, old = self._index.holders, self._expected, self._expected_before
        depth, beyond = 0, len(blocks) + 1
        while beyond - depth > 1:  # the first `depth` are held, the first `beyond` are not
            middle = (depth + beyond) // 2
            block = blocks[middle - 1]
            if held.get(block, 0) & workers or (new.get(block, 0) | old.get(block, 0)) & workers:
                depth = middle
            else:
                beyond = middle
        if not depth:
            return 0, 0
        last = blocks[depth - 1]
        having = (held.get(last, 0) | new.get(last, 0) | old.get(last, 0)) & workers
        in_pool = having & ~self._index.demoted.get(last, 0)
        return depth, in_pool or having  # what is in a tier below is quicker than computing, and slower than the pool

    def num_shared(self, blocks: Sequence[int]) -> int:
        if shared := self._shared:
            for depth in range(len(blocks), 0, -1):
                if blocks[depth - 1] in shared:
                    return depth
        return 0

    def insert(self, blocks: Sequence[int], worker: int, num_known: int) -> None:
        if 0 < num_known < len(blocks):
            self._note_follower(blocks[num_known - 1], blocks[num_known])
        if not self._index.followed >> worker & 1:
            self._sent.insert(blocks, worker)
            return
        now = self._clock()
        if now - self._since > EXPECTED_SECONDS:
            self._expected_before, self._expected, self._since = self._expected, {}, now
        expected, sent = self._expected, dict.fromkeys(blocks[num_known:], 1 << worker)
        for block in expected.keys() & sent.keys():  # also sent to another
            sent[block] |= expected[block]
        expected.update(sent)

    def _note_follower(self, block: int, follower: int) -> None:
        seen = self._followers.get(block, ())
        if follower not in seen and len(seen) < FOLLOWERS_OF_SHARED:
            self._followers[block] = (*seen, follower)
            if len(seen) + 1 == FOLLOWERS_OF_SHARED:
                self._shared.add(block)
        self._followers.move_to_end(block)
        if len(self._followers) > self._max_blocks:
            self._shared.discard(self._followers.popitem(last=False)[0])

    def forget(self, worker: int) -> None:
        self._sent.forget(worker)
        self._expected.clear()
        self._expected_before.clear()
