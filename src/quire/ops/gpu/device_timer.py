"""How long the device works on something, without waiting for it."""

import time
from collections import deque

import torch


class DeviceTimer:
    """Intervals of a stream, in order. On a CPU, of the clock."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begin: torch.cuda.Event | float = 0.0
        self._intervals: deque[tuple[torch.cuda.Event | float, torch.cuda.Event | float]] = deque()

    def start(self) -> None:
        self._begin = self._now()

    def stop(self) -> None:
        """Ends an interval; another may be started before the device is there."""
        self._intervals.append((self._begin, self._now()))

    def take(self) -> list[float]:
        """The seconds of the intervals that have ended since the last call, up to the first that has not."""
        seconds = []
        while self._intervals and _has_passed(self._intervals[0][1]):
            begin, end = self._intervals.popleft()
            if isinstance(begin, float) or isinstance(end, float):
                assert isinstance(begin, float) and isinstance(end, float)
                seconds.append(end - begin)
            else:
                seconds.append(begin.elapsed_time(end) / 1000)
        return seconds

    def _now(self) -> torch.cuda.Event | float:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _has_passed(moment: torch.cuda.Event | float) -> bool:
    return isinstance(moment, float) or moment.query()
