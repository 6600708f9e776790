"""Puts the batches of one engine in order: doubled ones are dropped, missing ones asked for, a restart is noticed.

Batches are numbered from 0. What is missing is asked for from the last batch on that is known: if the engine's copy of
that one is another, the engine was restarted. An engine that is not known, or no longer, is asked for a snapshot; one
that has none (vLLM) for all that it can replay."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.gateway.kv_batches import AllBlocksCleared, BlockEvent, KVBatch

MAX_PENDING = 4096  # batches that wait for one before them; with more, the engine is asked for a snapshot

Apply = Callable[[list[BlockEvent]], None]
Numbered = list[tuple[int, KVBatch]]


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    start: int | None  # number of the first batch; None: a snapshot
    time: float | None = None  # of this batch, where it is known


SNAPSHOT_REQUEST = ReplayRequest(None)
WHOLE_REPLAY = ReplayRequest(0)


class BatchFollower:
    """`receive` takes batches as they come; `wanted` says what to ask the engine for; `answered` takes its answer."""

    def __init__(self, apply: Apply, can_ask: bool = True) -> None:
        """`can_ask`: the engine replays."""
        self._apply, self._can_ask = apply, can_ask
        self._next: int | None = None if can_ask else -1  # number of the next batch; None: not in step with the engine
        self._time = 0.0  # of the last batch
        self._pending: dict[int, KVBatch] = {}
        self._has_snapshots = True  # whether the worker sends snapshots, as far as is known
        self._checks = False
        self.num_gaps = 0

    @property
    def in_step(self) -> bool:
        return self._next is not None and not self._pending

    def check(self) -> None:
        """Ask whether batches were lost that no later one has told of."""
        self._checks = True

    def disconnected(self) -> None:
        """What is there next may be another engine. Until it has answered, what is known stays."""
        self._pending.clear()
        self._has_snapshots = True
        if self._can_ask:
            self._next = None
        else:
            self._next = -1
            self._apply([AllBlocksCleared()])

    def receive(self, number: int, batch: KVBatch) -> None:
        if not self._can_ask:
            self._receive_alone(number, batch)
        elif self._next is None or number > self._next:
            self.num_gaps += self._next is not None and not self._pending
            self._pending[number] = batch
            if len(self._pending) > MAX_PENDING:
                self._next, self._pending = None, {number: batch}
        elif number == self._next:
            self._take(number, batch)
            self._take_pending()
        elif batch.time > self._time:  # a number that was used before: another engine counts
            self._next, self._pending = None, {number: batch}

    def _receive_alone(self, number: int, batch: KVBatch) -> None:
        """Without a replay, what is known is forgotten when something is missing: better nothing than what is wrong."""
        assert self._next is not None
        if number < self._next and batch.time <= self._time:
            return
        if number != self._next:
            self.num_gaps += self._next >= 0
            self._apply([AllBlocksCleared()])
        self._take(number, batch)

    @property
    def wanted(self) -> ReplayRequest | None:
        if not self._can_ask:
            return None
        if self._next is None:
            return SNAPSHOT_REQUEST if self._has_snapshots else WHOLE_REPLAY
        if not self._pending and not self._checks:
            return None
        return ReplayRequest(self._next - 1, self._time) if self._next else WHOLE_REPLAY

    def answered(self, request: ReplayRequest, batches: Numbered) -> None:
        """What the engine has replayed for `request`. Meanwhile other batches may have come."""
        self._checks = False
        if request.start is None:
            self._begin(batches) if batches else self._without_snapshot()
        elif self._next is None:
            if request == WHOLE_REPLAY:
                self._begin(batches)
        elif not _continues(request, batches):
            self._next = None  # another engine, or too much is missing
        else:
            for number, batch in batches:
                if number == self._next:
                    self._take(number, batch)
            self._take_pending()

    def _without_snapshot(self) -> None:
        self._has_snapshots = False

    def _begin(self, batches: Numbered) -> None:
        """With a snapshot, or with all that can be replayed."""
        self._apply([AllBlocksCleared()])
        self._next, self._time = 0, 0.0
        for number, batch in batches:
            self._take(number, batch)
        self._take_pending()

    def _take(self, number: int, batch: KVBatch) -> None:
        self._next, self._time = number + 1, batch.time
        self._apply(batch.events)

    def _take_pending(self) -> None:
        assert self._next is not None
        while (batch := self._pending.pop(self._next, None)) is not None:
            if batch.time > self._time:  # else it is of an engine that was there before
                self._take(self._next, batch)
        for number in [n for n, batch in self._pending.items() if n < self._next or batch.time <= self._time]:
            del self._pending[number]


def _continues(request: ReplayRequest, batches: Numbered) -> bool:
    """Whether a replay begins where it should, with the batch that is known."""
    if request.time is None:
        return not batches or batches[0][0] == request.start
    return bool(batches) and (batches[0][0], batches[0][1].time) == (request.start, request.time)
