"""Which requests the engine of the moment has, and which of them it may have died of.

An engine tells what it works on (`ActiveWork`). The requests that it worked on when it died are suspects until they
gain output. One that gains none from crash to crash is given to the next engine first, without the others, so that a
crash has one cause. Requests that were not worked on, or have gained output since, never pay."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from quire.client.inflight import InFlight
from quire.engine.messages import ToEngine
from quire.ipc.active_work import RequestSample

log = logging.getLogger("quire.engine")

NUM_DEATHS_TO_RUN_FIRST = 2  # without output in between
MAX_CRASHES = 3  # without output in between: the request is the cause
SECONDS_ALONE = 5.0  # for each crash: suspects may take that long to their first output while the others wait


def num_crashes(request: InFlight) -> int:
    return max(request.crashes.values(), default=0)


def num_deaths(request: InFlight) -> int:
    return max(num_crashes(request), request.num_kills)


def is_suspect(request: InFlight) -> bool:
    """An engine has died of it perhaps, or engines were killed from outside so early that it gained nothing."""
    return num_crashes(request) > 0 or num_deaths(request) >= NUM_DEATHS_TO_RUN_FIRST


class Submissions:
    """Gives requests to the engine: as they come, or while there are suspects these first, one at a time.

    Kills from outside have no cause here. But where each comes before a step has ended, smaller steps may end: requests
    that gain nothing from kill to kill run some at a time, a quarter as many after each kill."""

    def __init__(self, requests: Mapping[str, InFlight], on_open: Callable[[], None]) -> None:
        """`requests`: those in flight, in the order they came. `on_open` is called when the engine has all of them."""
        self._requests = requests
        self._send: Callable[[ToEngine], None]  # to the engine of the moment
        self._on_open = on_open
        self.open = False  # requests that come are submitted at once
        self._submitted: set[str] = set()
        self._suspects: deque[InFlight] = deque()  # that have not been submitted
        self._unproven: list[InFlight] = []  # suspects that have been, whose output the others wait for
        self._max_unproven = 1
        self._timer: asyncio.TimerHandle | None = None

    def add(self, request: InFlight) -> None:
        """Submit a new request, now or when the engine takes it. Raises if it cannot be encoded."""
        if self.open:
            self._submit(request)

    def engine_ready(self, send: Callable[[ToEngine], None]) -> None:
        """Give a new engine the requests in flight, suspects first."""
        self._send = send
        in_flight = self._requests.values()
        self._suspects = deque(each for each in in_flight if num_deaths(each) >= NUM_DEATHS_TO_RUN_FIRST)
        most_kills = max((each.num_kills for each in self._suspects), default=0)
        crashed = any(num_crashes(each) >= NUM_DEATHS_TO_RUN_FIRST for each in self._suspects)
        self._max_unproven = 1 if crashed else max(1, len(self._suspects) // 4 ** max(most_kills - 1, 0))
        self._next()

    def close(self) -> None:
        """There is no engine."""
        self.open = False
        self._unproven.clear()
        self._stop_timer()

    def engine_died(self, active: Iterable[RequestSample], killed: bool) -> InFlight | None:
        """Count the crash for the requests that it was active with. -> the one that causes the crashes, if it is clear.

        Where nothing was active, any request may have left something broken, unless the engine was `killed`."""
        worked_on = [(self._requests[name], sample) for name, sample in active if name in self._requests]
        if not worked_on and not killed:
            worked_on = [(self._requests[name], 0) for name in self._submitted]
        self._submitted.clear()
        if not killed:
            return _charge(worked_on)
        for request in {request.id: request for request, _ in worked_on}.values():
            request.num_kills += 1
        return None

    @property
    def num_submitted(self) -> int:
        return len(self._submitted)

    def ended(self, request: InFlight) -> None:
        self._submitted.discard(request.id)
        self.update()

    def update(self) -> None:
        """Call when requests have gained output."""
        if self._unproven:
            left = [suspect for suspect in self._unproven if num_deaths(suspect) and not suspect.finished]
            if len(left) < len(self._unproven):
                self._unproven = left
                self._next()

    def _next(self) -> None:
        """Submit the next suspects or, when there are none, all the others."""
        while self._suspects and len(self._unproven) < self._max_unproven:
            suspect = self._suspects.popleft()
            if not suspect.finished and self._submit_or_fail(suspect):
                self._unproven.append(suspect)
                times = num_deaths(suspect)
                log.warning("request %s runs first: engines died %d times while they worked on it", suspect.id, times)
        self._stop_timer()
        if self._unproven:
            seconds = SECONDS_ALONE * max(map(num_deaths, self._unproven))
            self._timer = asyncio.get_running_loop().call_later(seconds, self._go_on)
        else:
            self._submit_others()

    def _go_on(self) -> None:
        """Wait no longer for the suspects that have been submitted."""
        self._unproven.clear()
        self._next()

    def _submit_others(self) -> None:
        self.open = True
        for request in list(self._requests.values()):
            if not request.finished and request.id not in self._submitted:
                self._submit_or_fail(request)
        self._on_open()

    def _submit(self, request: InFlight) -> None:
        for message in request.submission():
            self._send(message)
        self._submitted.add(request.id)

    def _submit_or_fail(self, request: InFlight) -> bool:
        try:
            self._submit(request)
        except (OverflowError, TypeError, ValueError):  # the request cannot be encoded: only this one fails
            log.exception("request %s cannot be given to an engine", request.id)
            request.fail("the request cannot be given to the engine")
            return False
        return True

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _charge(worked_on: Iterable[tuple[InFlight, int]]) -> InFlight | None:
    """-> the only request of those that has gained nothing since an earlier crash, if it has reached the limit"""
    requests = {}
    for request, sample in worked_on:
        request.crashed(sample)
        requests[request.id] = request
    suspects = [request for request in requests.values() if num_crashes(request) > 1]
    return suspects[0] if len(suspects) == 1 and num_crashes(suspects[0]) >= MAX_CRASHES else None
