"""How long a request that comes now would wait for its first token, from what the last steps took."""

import math

from quire.core.errors import QueueFull
from quire.core.records import StepRecord

MEMORY = 0.9  # what a step counts after the next one


class Forecast:
    """Prompts wait for those before them to be computed, and where all rows are taken, for others to end."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._backlog = 0  # tokens of prompts that have no first token yet
        self._tokens = self._seconds = 0.0  # of steps that computed prompts, the last ones counting most
        self._missing = 1.0  # of prompt tokens, those not found in the cache
        self._last_end: float | None = None
        self._interval = 0.0  # seconds between two ends, while requests wait for one

    @property
    def known(self) -> bool:
        """Whether a step has been measured that computed prompts."""
        return self._tokens > 0

    def add(self, num_tokens: int) -> None:
        self._backlog += num_tokens

    def begun(self, num_tokens: int) -> None:
        """It has its first token, or has ended without."""
        self._backlog -= num_tokens

    def ended(self, now: float, num_left: int) -> None:
        """A request has, and so many are left."""
        if self._last_end is not None:
            self._interval = MEMORY * self._interval + (1 - MEMORY) * (now - self._last_end)
        self._last_end = now if num_left >= self._max_num_seqs else None

    def step(self, record: StepRecord) -> None:
        if record.num_tokens - record.num_drafts >= 2 * max(record.num_drawn, 1):  # most of it was prompts
            self._tokens = MEMORY * self._tokens + record.num_tokens
            self._seconds = MEMORY * self._seconds + record.seconds
        if record.scheduler.prefix_queries:
            self._missing = 1 - record.scheduler.prefix_hits / record.scheduler.prefix_queries

    def wait(self, num_tokens: int, num_live: int) -> float:
        """Seconds, for a prompt of so many tokens while so many requests are under way; 0 while nothing is known."""
        if not self.known:
            return 0.0
        computing = (self._backlog + num_tokens) * self._missing * self._seconds / self._tokens
        return computing + max(0, num_live - self._max_num_seqs + 1) * self._interval

    def check(self, num_tokens: int, num_live: int, most: float | None, deadline: float | None) -> None:
        """Refuse now what would be too late anyway: `most` seconds of waiting, `deadline` seconds in all."""
        limit = min((seconds for seconds in (most, deadline) if seconds is not None), default=math.inf)
        if (seconds := self.wait(num_tokens, num_live)) > limit:
            raise QueueFull(
                f"the first token would take about {seconds:.1f} s, and {limit:.1f} s are allowed",
                "try again later, or allow more time",
                retry_after=max(1, math.ceil(seconds - limit)),
            )
