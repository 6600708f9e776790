"""A circuit breaker for each worker: after failures in a row nothing is sent to it for a while, then one request."""

from collections.abc import Callable
from typing import Literal

MAX_OPEN_SECONDS = 60.0

BreakerState = Literal["closed", "half_open", "open"]


class CircuitBreaker:
    """closed -> open after `max_failures` in a row; open -> half_open when its time is over; half_open -> closed by a
    success, or open again, for twice as long, by a failure. While it is half open one request is in flight."""

    def __init__(self, max_failures: int, open_seconds: float, clock: Callable[[], float]) -> None:
        self._max_failures, self._open_seconds, self._clock = max_failures, open_seconds, clock
        self._failures = 0
        self._opened: float | None = None
        self._seconds = open_seconds
        self._trying = False  # while half open
        self.num_opened = 0

    def configure(self, max_failures: int, open_seconds: float) -> None:
        """From the next failure on."""
        if (max_failures, open_seconds) != (self._max_failures, self._open_seconds):
            self._max_failures, self._open_seconds = max_failures, open_seconds
            self._seconds = open_seconds if self._opened is None else self._seconds

    @property
    def state(self) -> BreakerState:
        if self._opened is None:
            return "closed"
        return "half_open" if self._clock() >= self._opened + self._seconds else "open"

    @property
    def allows(self) -> bool:
        return self._opened is None or (self.state == "half_open" and not self._trying)

    def begin(self) -> None:
        """A request is sent."""
        if self._opened is not None:
            self._trying = True

    def succeeded(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the failures of a worker that was away, and is back."""
        self._failures, self._opened, self._trying = 0, None, False
        self._seconds = self._open_seconds

    def failed(self) -> None:
        self._failures += 1
        if self._opened is not None:
            if self._trying:
                self._seconds = min(2 * self._seconds, MAX_OPEN_SECONDS)
                self._open()
        elif self._failures >= self._max_failures:
            self._open()

    def gave_up(self) -> None:
        """The request ended without telling anything about the worker: its client left."""
        self._trying = False

    def eject(self) -> None:
        """Open it although requests succeed."""
        if self._opened is None:
            self._open()

    def _open(self) -> None:
        self._opened, self._trying = self._clock(), False
        self.num_opened += 1
