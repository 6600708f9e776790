"""Those who look at an engine, in the process that serves them."""

import asyncio
import contextlib
from dataclasses import replace

from quire.core.snapshot import Snapshot

MAX_STEPS = 1000  # kept for one who is slow


class LiveClient:
    """Has the newest snapshot. Of those it was too slow to fetch it still gets the steps."""

    def __init__(self) -> None:
        self.ended = False  # the engine is gone, and another would not be seen by this one
        self._snapshot: Snapshot | None = None
        self._arrived = asyncio.Event()

    def show(self, snapshot: Snapshot) -> None:
        missed = self._snapshot.steps if self._snapshot else []
        steps = [*missed, *snapshot.steps][-MAX_STEPS:]
        self._snapshot = replace(snapshot, steps=steps)  # it is shared with other viewers
        self._arrived.set()

    def end(self) -> None:
        self.ended = True
        self._arrived.set()

    async def next(self, patience: float) -> Snapshot | None:
        """The newest one not seen yet; None if none has come within `patience` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), patience)
        self._arrived.clear()
        snapshot, self._snapshot = self._snapshot, None
        return snapshot
