"""Requests that wait for a worker: by priority, then by the tenants' shares, then in the order they came. Bounded."""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from quire.core.errors import QueueFull, QuireError
from quire.core.fairness import VirtualCounters
from quire.gateway.config import Queue
from quire.gateway.router import Router
from quire.gateway.tenants import Tenant
from quire.gateway.worker import Worker

MAX_RETRY_AFTER = 60  # seconds
RATE_DECAY = 0.1  # weight of the newest interval between two requests that end

Lane = tuple[int, str, str]  # priority, tenant, model


class Admissible(Protocol):
    """A request that can wait."""

    tenant: Tenant
    priority: int
    targets: list[str | None]
    tried: set[Worker]
    max_wait: float  # seconds
    expected_tokens: float  # weighted, as the shares count them
    is_charged: bool  # its tenant's share has paid for it: it was started before, and goes first

    def choose(self) -> tuple[str | None, Worker | None] | None:
        """The model to ask, and its worker, or None where all are full; None: no worker can take it now."""

    def start(self, model: str | None, worker: Worker) -> None: ...

    def refuse(self, error: QuireError) -> None: ...


class AdmissionQueue:
    def __init__(self, settings: Queue, router: Router, clock: Callable[[], float]) -> None:
        self.settings = settings
        self._router, self._clock = router, clock
        self.counters = VirtualCounters()
        self._lanes: dict[Lane, deque[Admissible]] = {}
        self._timers: dict[Admissible, asyncio.TimerHandle] = {}
        self._interval = 0.0  # seconds between two requests that end, a running mean
        self._last_end: float | None = None

    def __len__(self) -> int:
        return len(self._timers)

    def lanes(self) -> dict[Lane, int]:
        """How many wait in each."""
        return {lane: len(waiting) for lane, waiting in self._lanes.items()}

    def submit(self, request: Admissible) -> None:
        """Start it, let it wait, or refuse it."""
        chosen = request.choose()
        if chosen is None:
            return request.refuse(self._router.unavailable(request.targets))
        model, worker = chosen
        lane = (request.priority, request.tenant.name, model or "")
        if worker is not None and (not self._lanes or request.is_charged or not self._is_behind(lane)):
            return self._start(request, model, worker)
        if len(self) >= self.settings.max_requests:
            message = f"{len(self)} requests wait for a worker, and {self.settings.max_requests} may"
            return request.refuse(QueueFull(message, "try again later", retry_after=self.retry_after()))
        return self._wait(lane, request)

    def remove(self, request: Admissible) -> None:
        """Take a waiting request out of its queue: its client left."""
        if (timer := self._timers.pop(request, None)) is not None:
            timer.cancel()
            for lane, waiting in list(self._lanes.items()):
                if request in waiting:
                    waiting.remove(request)
                    if not waiting:
                        del self._lanes[lane]

    def ended(self) -> None:
        """A request has left its worker."""
        now = self._clock()
        if self._last_end is not None:
            self._interval += RATE_DECAY * (now - self._last_end - self._interval)
        self._last_end = now
        self.pump()

    def pump(self) -> None:
        """Start what can be started."""
        while self._lanes and self._start_next():
            pass

    def retry_after(self) -> int:
        """Seconds until as many requests have ended as wait now, at the rate of the last ones."""
        return min(max(1, math.ceil(len(self) * self._interval)), MAX_RETRY_AFTER)

    def _start_next(self) -> bool:
        tenants = {name for _, name, _ in self._lanes}
        order = {name: place for place, name in enumerate(self.counters.next(tenants))}
        for lane in sorted(self._lanes, key=lambda lane: (lane[0], order[lane[1]])):
            request = self._lanes[lane][0]
            chosen = request.choose()
            if chosen is None:
                self._take(lane)
                request.refuse(self._router.unavailable(request.targets))
                return True
            if chosen[1] is not None:
                self._take(lane)
                self._start(request, chosen[0], chosen[1])
                return True
        return False

    def _start(self, request: Admissible, model: str | None, worker: Worker) -> None:
        if not request.is_charged:
            request.is_charged = True
            self.counters.serve(request.tenant.name, request.expected_tokens, request.tenant.weight)
        request.start(model, worker)

    def _is_behind(self, lane: Lane) -> bool:
        """Whether requests for the same model wait that it must not overtake."""
        return any(other[2] == lane[2] and other[0] <= lane[0] for other in self._lanes)

    def _wait(self, lane: Lane, request: Admissible) -> None:
        waiting = {name for _, name, _ in self._lanes}
        if request.tenant.name not in waiting:
            self.counters.arrives(request.tenant.name, waiting)
        self._lanes.setdefault(lane, deque()).append(request)
        seconds = min(self.settings.max_seconds, request.max_wait)
        self._timers[request] = asyncio.get_running_loop().call_later(seconds, self._expired, lane, request, seconds)

    def _take(self, lane: Lane) -> None:
        request = self._lanes[lane].popleft()
        if not self._lanes[lane]:
            del self._lanes[lane]
        self._timers.pop(request).cancel()

    def _expired(self, lane: Lane, request: Admissible, seconds: float) -> None:
        self.remove(request)
        message = f"no worker had room within {seconds:g} s"
        request.refuse(QueueFull(message, "try again later", retry_after=self.retry_after()))
