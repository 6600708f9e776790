"""Notices an engine that is alive and does not answer: a process that was stopped, or a step that never ends."""

import asyncio
import time
from collections.abc import Callable

STALL_SECONDS = 30.0  # without a message, while there is work; the longest step of a healthy engine takes less


class Watchdog:
    """Pings an engine that has work and is silent. `heard` is called with every message of the engine."""

    def __init__(self, is_busy: Callable[[], bool], ping: Callable[[], None], seconds: float = STALL_SECONDS) -> None:
        self._is_busy, self._ping = is_busy, ping
        self.seconds = seconds
        self._heard = time.monotonic()

    @property
    def stalled(self) -> bool:
        return self._is_busy() and time.monotonic() - self._heard > self.seconds

    def heard(self) -> None:
        self._heard = time.monotonic()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.seconds / 4)
            if not self._is_busy():
                self.heard()  # an idle engine has nothing to say
            elif time.monotonic() - self._heard > self.seconds / 4:
                self._ping()
