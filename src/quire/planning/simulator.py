"""Serving on a virtual clock: the engine's own scheduler, with computed step times instead of steps."""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.core.params import SamplingParams
from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.planning.step_times import StepTimes, StepWork
from quire.planning.workload import Arrival

_OUTPUT_IDS = 1 << 48  # first of the token ids that outputs have: no prompt has them


@dataclass(slots=True)
class SimulatedRequest:
    """Times in seconds since the beginning."""

    arrival: float
    num_prompt: int
    num_output: int
    replica: int = 0
    first_token: float = 0.0
    finished: float = 0.0
    num_cached: int = 0

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        return (self.finished - self.first_token) / max(1, self.num_output - 1)

    @property
    def latency(self) -> float:
        return self.finished - self.arrival


@dataclass(slots=True)
class _Running:
    plan: StepPlan
    ends: float
    seconds: float
    output: StepOutput


class Replica:
    """One engine: a scheduler, and the steps that are in flight on its device."""

    def __init__(self, index: int, scheduler: Scheduler, times: StepTimes, *, ahead: int = 0) -> None:
        self.index = index
        self.scheduler = scheduler
        self.num_steps = 0
        self.busy_seconds = 0.0
        self.requests: dict[str, SimulatedRequest] = {}  # in flight
        self._times, self._ahead = times, ahead
        self._known: dict[int, int] = {}  # tokens of each row
        self._steps: deque[_Running] = deque()
        self._device_free = 0.0

    @property
    def load(self) -> int:
        """Requests in flight."""
        return len(self.requests)

    def add(self, request: Request, simulated: SimulatedRequest, now: float) -> None:
        simulated.replica = self.index
        self.requests[request.id] = simulated
        self.scheduler.add(request, now)

    def step(self, now: float) -> float | None:
        """What the engine's loop does once. -> when it goes on; None: it waits for requests"""
        if self.scheduler.has_work:
            plan = self.scheduler.schedule()
            self._submit(plan, now)
            if plan.runs and len(self._steps) <= self._ahead:
                return now
        if not self._steps:
            return None
        step = self._steps.popleft()
        self._finish(step)
        return max(now, step.ends)

    def _submit(self, plan: StepPlan, now: float) -> None:
        output = self._sample(plan)
        seconds = self._times.seconds(StepWork.of(plan, len(output.sampled))) if plan.runs else 0.0
        ends = max(now, self._device_free) + seconds
        self._device_free = ends
        self.busy_seconds += seconds
        self.num_steps += 1
        self._steps.append(_Running(plan, ends, seconds, output))

    def _sample(self, plan: StepPlan) -> StepOutput:
        known = self._known
        for admission in plan.admitted:
            known[admission.row] = len(admission.tokens)
        sampled = []
        for run in plan.runs:
            if run.start + run.count == known[run.row]:
                known[run.row] += 1
                sampled.append(SampledRow(run.row, [_OUTPUT_IDS + known[run.row]]))
        return StepOutput(plan.step, sampled)

    def _finish(self, step: _Running) -> None:
        for event in self.scheduler.update(step.output):
            request = self.requests[event.request_id]
            request.first_token = request.first_token or step.ends
            if event.final:
                request.finished = step.ends
                request.num_cached = event.num_cached
                del self.requests[event.request_id]
        self.scheduler.record_step(step.plan, step.seconds)


Router = Callable[[Sequence[Replica], Arrival, int], Replica]


def round_robin(replicas: Sequence[Replica], arrival: Arrival, number: int) -> Replica:
    return replicas[number % len(replicas)]


def least_busy(replicas: Sequence[Replica], arrival: Arrival, number: int) -> Replica:
    """The fewest requests in flight."""
    return min(replicas, key=lambda replica: replica.load)


def by_prefix(replicas: Sequence[Replica], arrival: Arrival, number: int) -> Replica:
    """The replica that prompts with this first block went to, unless it has 16 requests more than the least busy."""
    block = hash(tuple(arrival.prompt_ids[:16]))
    chosen, least = replicas[block % len(replicas)], least_busy(replicas, arrival, number)
    return least if chosen.load > least.load + 16 else chosen


ROUTERS: dict[str, Router] = {"round-robin": round_robin, "least-busy": least_busy, "prefix": by_prefix}


@dataclass(slots=True)
class Simulation:
    requests: list[SimulatedRequest] = field(default_factory=list)
    replicas: list[Replica] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(request.finished for request in self.requests) - min(r.arrival for r in self.requests)


def simulate(arrivals: Sequence[Arrival], replicas: list[Replica], router: Router = least_busy) -> Simulation:
    """Serve all arrivals."""
    simulation = Simulation(replicas=replicas)
    due: list[tuple[float, int]] = []  # (when, replica): a heap of engines that go on
    idle = {replica.index for replica in replicas}
    pending = deque(enumerate(arrivals))
    while pending or due:
        if pending and (not due or pending[0][1].time <= due[0][0]):
            number, arrival = pending.popleft()
            request = SimulatedRequest(arrival.time, len(arrival.prompt_ids), arrival.output)
            simulation.requests.append(request)
            replica = router(replicas, arrival, number)
            replica.add(_request(number, arrival), request, arrival.time)
            if replica.index in idle:
                idle.remove(replica.index)
                heapq.heappush(due, (arrival.time, replica.index))
            continue
        now, index = heapq.heappop(due)
        goes_on = replicas[index].step(now)
        if goes_on is None:
            idle.add(index)
        else:
            heapq.heappush(due, (goes_on, index))
    return simulation


def _request(number: int, arrival: Arrival) -> Request:
    params = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
    return Request(
        id=str(number),
        prompt_ids=arrival.prompt_ids,
        params=params,
        arrival=arrival.time,
        priority=arrival.priority,
    )
