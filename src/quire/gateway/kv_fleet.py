"""The KV events of all workers: a listener for each that publishes them, and one index."""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from quire.core.kv_events import block_hashes, root_hash
from quire.gateway.kv_follower import BatchFollower
from quire.gateway.kv_index import KVIndex
from quire.gateway.worker import Worker

if TYPE_CHECKING:
    import zmq

    from quire.gateway.kv_listener import KVListener

MAX_PROMPT_BLOCKS = 4096  # of one prompt; what comes behind them does not count


class KVFleet:
    def __init__(self, max_blocks: int) -> None:
        """`max_blocks`: of one worker."""
        self.index = KVIndex(max_blocks)
        self._listeners: dict[Worker, KVListener] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def added(self, worker: Worker) -> None:
        entry = worker.entry
        if not entry.kv_events:
            return
        import zmq

        from quire.gateway.kv_listener import KVListener

        self._context = self._context or zmq.Context()
        own_key = f"tenant:{entry.tenant}" if entry.tenant else ""
        follower = BatchFollower(
            lambda events: self.index.apply(worker.bit, events, own_key), can_ask=bool(entry.kv_replay)
        )
        self.index.follow(worker.bit)
        self._listeners[worker] = KVListener(
            worker.name, entry.kv_events, entry.kv_replay, entry.kv_topic, follower, self._context
        )

    def removed(self, worker: Worker) -> None:
        if (listener := self._listeners.pop(worker, None)) is not None:
            listener.stop()  # the bit may be given to another worker at once
            self.index.forget(worker.bit)
            task = asyncio.create_task(listener.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def away(self, worker: Worker) -> None:
        """A worker does not answer: what its cache held may be gone."""
        if (listener := self._listeners.get(worker)) is not None:
            self.index.clear(worker.bit)
            listener.follower.disconnected()

    def blocks(self, ids: list[int], workers: Iterable[Worker], salt: str) -> list[int] | None:
        """The blocks of a prompt, of the size that these workers have; None: none of them publishes events."""
        sizes = (self.index.block_sizes.get(worker.bit) for worker in workers)
        size = next((size for size in sizes if size), None)
        if size is None:
            return None
        return block_hashes(root_hash([salt] if salt else []), ids[: size * MAX_PROMPT_BLOCKS], size)

    def num_gaps(self, worker: Worker) -> int:
        listener = self._listeners.get(worker)
        return listener.follower.num_gaps if listener else 0

    def follows(self, worker: Worker) -> bool:
        return worker in self._listeners

    def in_step(self, worker: Worker) -> bool:
        listener = self._listeners.get(worker)
        return listener is not None and listener.follower.in_step

    async def close(self) -> None:
        await asyncio.gather(*(listener.close() for listener in self._listeners.values()), *self._closing)
        if self._context is not None:
            self._context.destroy(0)
