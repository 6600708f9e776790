"""What a device computed just before a step: a GPU that computes much lowers its clock to stay within its power."""

from math import exp

SECONDS = 0.1  # an H200 lowers its clock after so long, and raises it again


class RecentRate:
    """Tokens a second, of which those of the last `SECONDS` count most."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._ended = 0.0  # the last step

    def at(self, begins: float) -> int:
        """As a step finds it."""
        return round(self._rate * exp(-max(0.0, begins - self._ended) / SECONDS))

    def add(self, num_tokens: int, begins: float, seconds: float) -> None:
        """A step ran."""
        rest, share = exp(-max(0.0, begins - self._ended) / SECONDS), exp(-seconds / SECONDS)
        self._rate = self._rate * rest * share + num_tokens / seconds * (1 - share)
        self._ended = begins + seconds
