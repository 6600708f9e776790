"""Serving on a virtual clock: the engine's own scheduler, with computed step times instead of steps."""

import gc
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.planning.replica import Replica, SimulatedRequest
from quire.planning.routers import Router, least_busy
from quire.planning.workload import Arrival


@dataclass(slots=True)
class Simulation:
    requests: list[SimulatedRequest] = field(default_factory=list)  # in order of arrival
    replicas: list[Replica] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(request.finished for request in self.requests) - min(r.arrival for r in self.requests)


def simulate(arrivals: Sequence[Arrival], replicas: list[Replica], router: Router = least_busy) -> Simulation:
    """Serve all arrivals, and the turns that follow them."""
    collected = gc.isenabled()
    gc.disable()  # millions of tokens and no cycles: the collector would go through them again and again
    try:
        return _Clock(arrivals, replicas, router).run()
    finally:
        if collected:
            gc.enable()


class _Clock:
    """Events in order of time: a request comes, or an engine goes on."""

    def __init__(self, arrivals: Sequence[Arrival], replicas: list[Replica], router: Router) -> None:
        self._replicas, self._router = replicas, router
        self._simulation = Simulation(replicas=replicas)
        self._delay = replicas[0].costs.request
        self._pending = [(arrival.time + self._delay, number, arrival) for number, arrival in enumerate(arrivals)]
        heapq.heapify(self._pending)
        self._num_arrivals = len(self._pending)
        self._due: list[tuple[float, int]] = []  # (when, replica): engines that go on
        self._idle = {replica.index for replica in replicas}
        # A turn that follows an answer of another engine may come at any time: then every step is made by itself.
        turns = any(arrival.followed_by for arrival in arrivals)
        self._compress = len(replicas) == 1 or not turns

    def run(self) -> Simulation:
        pending, due = self._pending, self._due
        while pending or due:
            if pending and (not due or pending[0][0] <= due[0][0]):
                self._add(*heapq.heappop(pending))
                continue
            now, index = heapq.heappop(due)
            horizon = (pending[0][0] if pending else float("inf")) if self._compress else 0.0
            goes_on = self._replicas[index].step(now, horizon)
            for ended in self._replicas[index].take_ended():
                self._follow(ended)
            if goes_on is None:
                self._idle.add(index)
            else:
                heapq.heappush(due, (goes_on, index))
        return self._simulation

    def _add(self, now: float, number: int, arrival: Arrival) -> None:
        replica = self._router(self._replicas, arrival, number)
        request = SimulatedRequest(number, arrival)
        self._simulation.requests.append(request)
        replica.add(request, now)
        if replica.index in self._idle:
            self._idle.remove(replica.index)
            heapq.heappush(self._due, (now, replica.index))

    def _follow(self, ended: SimulatedRequest) -> None:
        """The next turn: the prompt is what was said so far, and its own tokens."""
        turn = ended.asked.followed_by
        if turn is None:
            return
        prompt = [*ended.asked.prompt_ids, *ended.output_ids(), *turn.prompt_ids]
        asked = Arrival(ended.finished + turn.time, prompt, turn.output, turn.priority, turn.followed_by)
        heapq.heappush(self._pending, (asked.time + self._delay, self._num_arrivals, asked))
        self._num_arrivals += 1
