"""Batches of KV events in vLLM's format (msgpack), numbered, and kept for a while to be replayed.

What vLLM does not have: a log begins with AllBlocksCleared, and a replay from SNAPSHOT on is what is stored now, as
batches under the number of the last one. vLLM answers it with nothing."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec

from quire.core.kv_events import POOL, KeptBlocks, KVEvent, RemovedBlocks, StoredMirror, namespace_keys

SNAPSHOT = (1 << 64) - 1  # instead of the number of a batch
SNAPSHOT_BLOCKS = 4096  # in one message, about
CLEARED = {"type": "AllBlocksCleared"}

Numbered = tuple[int, bytes]

_encode = msgspec.msgpack.Encoder().encode


class BatchLog:
    def __init__(self, block_size: int, buffer_steps: int, clock: Callable[[], float] = time.time) -> None:
        self._block_size, self._clock = block_size, clock
        self._buffer: deque[Numbered] = deque(maxlen=buffer_steps)
        self._mirror = StoredMirror()
        self._number = -1  # of the last batch
        self._time = 0.0  # of the last batch

    def begin(self) -> Numbered:
        """The first batch."""
        return self._append([CLEARED])

    def append(self, events: list[KVEvent]) -> Numbered:
        self._mirror.apply(events)
        return self._append([self._wire(event) for event in events])

    def _append(self, events: list[dict[str, Any]]) -> Numbered:
        self._number += 1
        self._time = max(self._clock(), self._time + 1e-6)  # a later batch is never older
        batch = self._number, self._payload(events)
        self._buffer.append(batch)
        return batch

    def replay(self, start: int) -> Iterable[Numbered]:
        if start == SNAPSHOT:
            return ((self._number, payload) for payload in self._snapshot())
        return [batch for batch in self._buffer if batch[0] >= start]

    def _snapshot(self) -> Iterator[bytes]:
        events: list[dict[str, Any]] = [CLEARED]
        num_blocks = 0
        for event in self._mirror.events():
            events.append(self._wire(event))
            num_blocks += len(event.hashes)
            if num_blocks >= SNAPSHOT_BLOCKS:
                yield self._payload(events)
                events, num_blocks = [], 0
        yield self._payload(events)

    def _payload(self, events: list[dict[str, Any]]) -> bytes:
        return _encode([self._time, events, 0])  # time, events, data_parallel_rank

    def _wire(self, event: KVEvent) -> dict[str, Any]:
        if isinstance(event, RemovedBlocks):
            return {"type": "BlockRemoved", "block_hashes": event.hashes, "medium": event.tier}
        if isinstance(event, KeptBlocks):  # as vLLM has it: their names alone
            fields: dict[str, Any] = {
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": self._block_size,
                "lora_id": None,
            }
            return {"type": "BlockStored", "block_hashes": event.hashes, **fields, "medium": event.tier}
        keys = namespace_keys(event.namespace) if event.namespace else []
        adapter = event.namespace[2].partition("#")[0] if event.namespace else ""
        return {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": list(chain.from_iterable(event.tokens)),
            "block_size": self._block_size,
            "lora_id": None,
            "medium": POOL,
            "lora_name": adapter or None,
            "extra_keys": [keys or None, *([None] * (len(event.hashes) - 1))],
            "group_idx": 0,
        }
