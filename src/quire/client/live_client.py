"""A client of the live view, in the server process."""

import asyncio
import contextlib
from dataclasses import replace

from quire.core.snapshot import Snapshot

MAX_STEPS = 1000  # kept for a slow client


class LiveClient:
    """Holds the newest snapshot, with the steps of those that it was too slow to fetch."""

    def __init__(self) -> None:
        self.ended = False  # the engine has stopped for good
        self._snapshot: Snapshot | None = None
        self._arrived = asyncio.Event()

    def show(self, snapshot: Snapshot) -> None:
        missed = self._snapshot.steps if self._snapshot else []
        steps = [*missed, *snapshot.steps][-MAX_STEPS:]
        self._snapshot = replace(snapshot, steps=steps)  # other clients share it
        self._arrived.set()

    def end(self) -> None:
        self.ended = True
        self._arrived.set()

    async def next(self, timeout: float) -> Snapshot | None:
        """The newest snapshot not fetched yet; None if none arrives within `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout)
        self._arrived.clear()
        snapshot, self._snapshot = self._snapshot, None
        return snapshot
