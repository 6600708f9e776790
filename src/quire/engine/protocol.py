"""What the engine process drives: an engine that generates, or one that encodes."""

from typing import Any, Protocol

from quire.core.records import SchedulerStats, StepRecord
from quire.core.snapshot import Snapshot
from quire.executors.protocol import Capacity


class EngineLoop(Protocol):
    """One thread; ids in, events out."""

    capacity: Capacity
    record: StepRecord | None  # of the step that ended in the last call of step(), if one did

    @property
    def has_work(self) -> bool: ...

    @property
    def idle_timeout(self) -> float | None:
        """Seconds until step() or snapshot() has something to do; None: until a message comes."""

    def submit(self, request: Any) -> None:
        """Raises a QuireError if the request can never be served."""

    def cancel(self, request_id: str, index: int | None = None) -> list[Any]:
        """End a request, or one sample of it. One that has ended is no error. -> its last events"""

    def step(self) -> list[Any]:
        """Begin a step, and finish the oldest in flight unless the executor takes another. -> events"""

    def stats(self) -> SchedulerStats: ...

    def watch(self, on: bool) -> None:
        """Make snapshots, or stop. While off, they cost nothing."""

    def snapshot(self) -> Snapshot | None:
        """The next one, if it is due."""

    def stop(self) -> None: ...
