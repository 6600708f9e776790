"""Serving on a virtual clock: the engine's own scheduler, with computed step times instead of steps."""

import gc
import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from quire.planning.prompt_ids import joined
from quire.planning.replica import Replica
from quire.planning.routers import Router, least_busy
from quire.planning.server_loop import Incoming
from quire.planning.simulated_request import SimulatedRequest
from quire.planning.workload import Arrival


@dataclass(slots=True)
class Simulation:
    requests: list[SimulatedRequest] = field(default_factory=list)  # in order of arrival
    replicas: list[Replica] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(request.finished for request in self.requests) - min(r.arrival for r in self.requests)


def simulate(
    arrivals: Sequence[Arrival], replicas: list[Replica], router: Router = least_busy,
    advance: Callable[[], object] = lambda: None, max_concurrency: int | None = None,
) -> Simulation:  # fmt: skip
    """Serve all arrivals, and the turns that follow them. `advance` is called whenever a request has ended.
    `max_concurrency`: requests in flight at most. Others wait at their clients, and their times count from when they
    are sent."""
    collected = gc.isenabled()
    gc.disable()  # millions of tokens and no cycles: the collector would go through them again and again
    try:
        return _Clock(arrivals, replicas, router, advance=advance, max_concurrency=max_concurrency).run()
    finally:
        if collected:
            gc.enable()


class _Clock:
    """Events in order of time: a request comes, or an engine goes on.

    An engine whose sequences only decode sleeps until one of them may end, and catches up when a request comes: with
    many engines, few are looked at."""

    def __init__(
        self, arrivals: Sequence[Arrival], replicas: list[Replica], router: Router, *, compress: bool = True,
        advance: Callable[[], object] = lambda: None, max_concurrency: int | None = None,
    ) -> None:  # fmt: skip
        """`compress`: steps that are alike are made at once."""
        self._left = len(arrivals) if max_concurrency is None else max_concurrency  # requests that may be sent now
        self._held: deque[tuple[int, Arrival]] = deque()  # at their clients
        self._sent: set[int] = set()  # of those that were held: on their way to an engine
        self._replicas, self._router, self._compress, self._advance = replicas, router, compress, advance
        self._simulation = Simulation(replicas=replicas)
        self._delay = replicas[0].costs.way
        # When, in which order, what, and the replica that its router chose, if it did.
        self._pending: list[tuple[float, int, Arrival, Replica | None]] = [
            (arrival.time + self._delay, number, arrival, None) for number, arrival in enumerate(arrivals)
        ]
        heapq.heapify(self._pending)
        self._num_arrivals = len(self._pending)
        self._due: list[tuple[float, int, int]] = []  # (when, replica, its alarm): engines that go on
        self._alarms = [0] * len(replicas)  # the last of each replica: those before it do not count

    def run(self) -> Simulation:
        pending, due = self._pending, self._due
        while pending or due:
            if pending and (not due or pending[0][0] <= due[0][0]):
                self._add(*heapq.heappop(pending))
                continue
            now, index, alarm = heapq.heappop(due)
            if alarm == self._alarms[index]:
                self._go_on(self._replicas[index], now)
        return self._simulation

    def _go_on(self, replica: Replica, now: float) -> None:
        replica.catch_up(now)
        if replica.goes_on == now:
            replica.step()
        if replica.server:
            replica.server.run(now)
            for asked in replica.server.take_submitted():
                heapq.heappush(self._pending, (asked.time, asked.number, asked.arrival, replica))
        for ended in replica.take_ended():
            self._left += 1
            self._follow(ended)
            self._send_held(ended.finished)
            self._advance()
        when = replica.goes_on
        if self._compress and when is not None:
            when = replica.sleeps_until()
        self._wake(replica, now, when)

    def _wake(self, replica: Replica, now: float, when: float | None) -> None:
        """`when`: its engine goes on. Its server may do so before."""
        if replica.server and replica.server.is_awaited:
            when = min(inf if when is None else when, max(now, replica.server.next_turn))
        if when is not None:
            self._set_alarm(replica, when)

    def _set_alarm(self, replica: Replica, when: float) -> None:
        self._alarms[replica.index] += 1
        heapq.heappush(self._due, (when, replica.index, self._alarms[replica.index]))

    def _add(self, now: float, number: int, arrival: Arrival, replica: Replica | None) -> None:
        if replica is None:
            if not self._may_send(number):
                self._held.append((number, arrival))
                return
            replica = self._router(self._replicas, arrival, number)
            replica.catch_up(now)
            if replica.server:
                replica.server.receive(Incoming(now, number, arrival))
                self._wake(replica, now, replica.goes_on)
                return
            if (reaches := replica.receive(now)) > now:
                heapq.heappush(self._pending, (reaches, number, arrival, replica))
                return
        request = SimulatedRequest(number, arrival)
        self._simulation.requests.append(request)
        replica.catch_up(now)
        replica.add(request, now)
        self._wake(replica, now, replica.goes_on)

    def _may_send(self, number: int) -> bool:
        """Whether fewer than may be are in flight, or a place was kept for it."""
        if number in self._sent:
            self._sent.remove(number)
            return True
        if not self._left:
            return False
        self._left -= 1
        return True

    def _send_held(self, now: float) -> None:
        """Some may be sent, for others have ended."""
        while self._held and self._left:
            number, arrival = self._held.popleft()
            self._left -= 1
            self._sent.add(number)
            heapq.heappush(self._pending, (now + self._delay, number, replace(arrival, time=now), None))

    def _follow(self, ended: SimulatedRequest) -> None:
        """The next turn: the prompt is what was said so far, and its own tokens."""
        turn = ended.asked.followed_by
        if turn is None:
            return
        prompt = joined(ended.asked.prompt_ids, ended.output_ids, turn.prompt_ids)
        asked = Arrival(ended.finished + turn.time, prompt, turn.output, turn.priority, turn.followed_by)
        heapq.heappush(self._pending, (asked.time + self._delay, self._num_arrivals, asked, None))
        self._num_arrivals += 1
