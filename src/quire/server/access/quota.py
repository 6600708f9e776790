"""How much one key may use: token buckets, and a limit of concurrent requests."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from quire.core.errors import BadRequest
from quire.server.errors import OverQuota

Clock = Callable[[], float]  # seconds

MINUTE, DAY = 60.0, 86400.0

RATE_HEADERS = [f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and of outputs
    tokens_per_day: int | None = None
    max_concurrency: int | None = None  # requests at the same time; one with several completions counts as so many

    @classmethod
    def of(cls, given: object) -> "QuotaLimits":
        """From a table of a file, whose fields have the same names."""
        return cls(**{spec.name: getattr(given, spec.name) for spec in fields(cls)})


class Bucket:
    """A token bucket: holds `capacity`, and fills up from empty in `seconds`. Its level may fall below zero, as the
    cost of a request is known only when it has ended."""

    def __init__(self, what: str, capacity: int, seconds: float, clock: Clock) -> None:
        self.what, self.capacity = what, capacity
        self._rate = capacity / seconds
        self._clock = clock
        self._level, self._at = float(capacity), clock()

    def level(self) -> float:
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._at) * self._rate)
        self._at = now
        return self._level

    def set_level(self, level: float) -> None:
        self._level, self._at = level, self._clock()

    def take(self, amount: int) -> None:
        self._level = self.level() - amount

    def wait(self, amount: float) -> float:
        """Seconds until it holds that much."""
        return max(0.0, (amount - self.level()) / self._rate)


class Quota:
    """The buckets of one key, and how many of its requests are in flight."""

    def __init__(self, name: str, limits: QuotaLimits, clock: Clock = time.monotonic) -> None:
        self.name, self.limits, self._clock = name, limits, clock
        self.running = 0
        self._requests = _bucket("requests a minute", limits.requests_per_minute, MINUTE, clock)
        self._tokens = _bucket("tokens a minute", limits.tokens_per_minute, MINUTE, clock)
        self._daily = _bucket("tokens a day", limits.tokens_per_day, DAY, clock)

    def change(self, limits: QuotaLimits) -> None:
        """Other limits: what was used within the old ones stays used, and requests in flight stay counted."""
        fresh = Quota(self.name, limits, self._clock)
        for name in ("_requests", "_tokens", "_daily"):
            old, new = getattr(self, name), getattr(fresh, name)
            if old is not None and new is not None:
                new.set_level(new.capacity - (old.capacity - old.level()))
            setattr(self, name, new)
        self.limits = limits

    def enter(self) -> None:
        """Count one more request. Raises OverQuota, with the time to wait, if it is one too many."""
        self.check_concurrency(1, 1)
        for bucket in (self._requests, self._tokens, self._daily):
            if bucket is not None and (wait := bucket.wait(1)) > 0:
                raise OverQuota(f"key `{self.name}` has used its {bucket.capacity} {bucket.what}", wait=wait)
        if self._requests is not None:
            self._requests.take(1)
        self.running += 1

    def check_concurrency(self, num_more: int, num_of_request: int) -> None:
        """Raises if `num_more` are too many; `num_of_request`: what the whole request asks for."""
        limit = self.limits.max_concurrency
        if limit is None or self.running + num_more <= limit:
            return
        if num_of_request > limit:
            raise BadRequest(
                f"the request asks for {num_of_request} completions, and key `{self.name}` may have {limit} in flight",
                "send fewer prompts, or ask for fewer completions",
                param="n",
            )
        raise OverQuota(f"key `{self.name}` has {self.running} requests in flight, and may have {limit}", wait=1.0)

    def charge(self, num_tokens: int) -> None:
        for bucket in (self._tokens, self._daily):
            if bucket is not None:
                bucket.take(num_tokens)

    def adopt(self, running: int, levels: Sequence[float]) -> None:
        """Take over what is counted elsewhere: requests in flight, and the levels of the buckets in their order."""
        self.running = running
        for bucket, level in zip((self._requests, self._tokens, self._daily), levels, strict=True):
            if bucket is not None:
                bucket.set_level(level)

    def headers(self) -> dict[str, str]:
        """With OpenAI's names. `reset` is the time until the bucket is full again."""
        shown: dict[str, str] = {}
        for kind, bucket in (("requests", self._requests), ("tokens", self._tokens or self._daily)):
            if bucket is not None:
                shown[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
                shown[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level())))
                shown[f"x-ratelimit-reset-{kind}"] = _duration(bucket.wait(bucket.capacity))
        return shown


def _bucket(what: str, capacity: int | None, seconds: float, clock: Clock) -> Bucket | None:
    return None if capacity is None else Bucket(what, capacity, seconds, clock)


def _duration(seconds: float) -> str:
    """6m0s, 1.5s, 20ms"""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{math.ceil(rest)}s" if minutes else f"{rest:.3g}s"
