"""How long a new request would wait for its first token, estimated from the last steps."""

import math

from quire.core.errors import QueueFull
from quire.core.records import StepRecord

DECAY = 0.9  # weight of a step after the next one


class Forecast:
    """A prompt waits until those before it are computed and, where all rows are taken, until requests end."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._backlog = 0  # tokens of prompts that have no first token yet
        self._tokens = self._seconds = 0.0  # of steps that computed prompts, decayed
        self._miss_rate = 1.0  # share of prompt tokens not found in the prefix cache
        self._last_end: float | None = None
        self._interval = 0.0  # seconds between two requests that end, while others wait

    @property
    def known(self) -> bool:
        """Whether a step has been measured that computed prompts."""
        return self._tokens > 0

    def add(self, num_tokens: int) -> None:
        self._backlog += num_tokens

    def begun(self, num_tokens: int) -> None:
        """A request has its first token, or has ended without."""
        self._backlog -= num_tokens

    def ended(self, now: float, num_left: int) -> None:
        """A request has ended, and `num_left` are in flight."""
        if self._last_end is not None:
            self._interval = DECAY * self._interval + (1 - DECAY) * (now - self._last_end)
        self._last_end = now if num_left >= self._max_num_seqs else None

    def step(self, record: StepRecord) -> None:
        if record.num_tokens - record.num_drafts >= 2 * max(record.num_drawn, 1):  # most of it was prompts
            self._tokens = DECAY * self._tokens + record.num_tokens
            self._seconds = DECAY * self._seconds + record.seconds
        if record.scheduler.prefix_queries:
            self._miss_rate = 1 - record.scheduler.prefix_hits / record.scheduler.prefix_queries

    def wait(self, num_tokens: int, num_live: int) -> float:
        """Seconds, for a prompt of `num_tokens` while `num_live` requests are in flight; 0 while nothing is known."""
        if not self.known:
            return 0.0
        computing = (self._backlog + num_tokens) * self._miss_rate * self._seconds / self._tokens
        return computing + max(0, num_live - self._max_num_seqs + 1) * self._interval

    def check(self, num_tokens: int, num_live: int, max_wait: float | None, timeout: float | None) -> None:
        """Refuse now what would come too late: after `max_wait` seconds of waiting, or `timeout` seconds in all."""
        limit = min((seconds for seconds in (max_wait, timeout) if seconds is not None), default=math.inf)
        if (seconds := self.wait(num_tokens, num_live)) > limit:
            raise QueueFull(
                f"the first token would take about {seconds:.1f} s, and {limit:.1f} s are allowed",
                "try again later, or allow more time",
                retry_after=max(1, math.ceil(seconds - limit)),
            )
