"""A histogram that costs a bisection. Written by the one thread of the event loop, so nothing is locked."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many values were at most each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)  # the last: above all bounds
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus reads them."""
        total, shown = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            shown.append((bound, float(total)))
        return shown

    @property
    def sum(self) -> float:
        return self._sum
