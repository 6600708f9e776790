"""What steps take."""

import time
from typing import Protocol


class Timer(Protocol):
    """On a GPU, the time of the device: other steps may be queued before those that are timed."""

    def start(self) -> None:
        """What follows is timed."""

    def stop(self, num_tokens: int, num_steps: int = 1) -> bool:
        """Since `start`, so many steps have been queued, each of so many tokens. -> whether they will be told of"""

    def take(self, num_intervals: int = 0) -> list[tuple[int, float]]:
        """Tokens and seconds of the steps that have ended since the last call, up to the first that has not. So many
        intervals are waited for."""


class ClockTimer:
    """Where a step has ended when it is stopped."""

    def __init__(self) -> None:
        self._begin = 0.0
        self._steps: list[tuple[int, float]] = []

    def start(self) -> None:
        self._begin = time.perf_counter()

    def stop(self, num_tokens: int, num_steps: int = 1) -> bool:
        seconds = time.perf_counter() - self._begin
        self._steps += [(num_tokens, seconds / num_steps)] * num_steps
        return True

    def take(self, num_intervals: int = 0) -> list[tuple[int, float]]:
        steps, self._steps = self._steps, []
        return steps
