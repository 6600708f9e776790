"""Clients of the live view, in the server process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from quire.core.snapshot import Snapshot
from quire.engine.messages import ToEngine, WatchEngine

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


class LiveClients:
    """All that watch one engine. It makes snapshots only while there are any."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        """`send`: to the engine of the moment."""
        self._send = send
        self._clients: set[LiveClient] = set()

    def __len__(self) -> int:
        return len(self._clients)

    @contextlib.asynccontextmanager
    async def watch(self) -> AsyncIterator[LiveClient]:
        client = LiveClient()
        self._clients.add(client)
        try:
            self._send(WatchEngine(True))  # also if others watch already: this one has not seen anything
            yield client
        finally:
            self._clients.remove(client)
            if not self._clients:
                self._send(WatchEngine(False))

    def engine_ready(self) -> None:
        if self._clients:
            self._send(WatchEngine(True))

    def show(self, snapshot: Snapshot) -> None:
        for client in self._clients:
            client.show(snapshot)

    def end(self) -> None:
        for client in self._clients:
            client.end()
