"""How long the device works on steps, without waiting for it."""

from collections import Counter, deque

import torch

from quire.ops.timer import ClockTimer


class DeviceTimer:
    """Intervals of a stream, in order. `num_untimed`: of steps of each size, the first ones that are left out: their
    kernels are compiled, or captured, in between."""

    def __init__(self, num_untimed: int = 0) -> None:
        self._num_untimed = num_untimed
        self._uses: Counter[int] = Counter()  # by the power of two below a size
        self._begin: torch.cuda.Event | None = None
        self._intervals: deque[tuple[torch.cuda.Event, torch.cuda.Event, int, int]] = deque()

    def start(self) -> None:
        self._begin = _now()

    def stop(self, num_tokens: int, num_steps: int = 1) -> bool:
        """Another interval may be started before the device is there."""
        assert self._begin is not None, "the timer was not started"
        self._uses[num_tokens.bit_length()] += 1
        if self._uses[num_tokens.bit_length()] <= self._num_untimed:
            return False
        self._intervals.append((self._begin, _now(), num_tokens, num_steps))
        return True

    def take(self, num_intervals: int = 0) -> list[tuple[int, float]]:
        steps = []
        if num_intervals:
            self._intervals[num_intervals - 1][1].synchronize()
        while self._intervals and self._intervals[0][1].query():
            begin, end, num_tokens, num_steps = self._intervals.popleft()
            steps += [(num_tokens, begin.elapsed_time(end) / 1000 / num_steps)] * num_steps
        return steps


def new_timer(device: torch.device, num_untimed: int = 0) -> DeviceTimer | ClockTimer:
    return DeviceTimer(num_untimed) if device.type == "cuda" else ClockTimer()


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
