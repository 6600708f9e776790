"""One engine on a virtual clock: its scheduler, and the steps that are in flight on its device."""

from collections import deque
from dataclasses import dataclass

from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.planning.fast_forward import num_steps_alike, skip_steps
from quire.planning.recent_rate import RecentRate
from quire.planning.server_loop import Message, ServerLoop
from quire.planning.simulated_drafts import WRONG, SimulatedDrafts
from quire.planning.simulated_request import SimulatedRequest
from quire.planning.step_times import ServingCosts, StepTimes, StepWork

LAUNCHED = 0.8  # of a turn of the loop of a GPU's engine, what passes until the device may begin


@dataclass(slots=True)
class StepInFlight:
    plan: StepPlan
    has_prompts: bool
    ends: float
    seconds: float
    output: StepOutput


def num_shared_tokens(scheduler: Scheduler) -> int:
    """Of the cached tokens that running sequences read: those of prefixes that several of them have."""
    size, blocks = scheduler.limits.block_size, []
    for seq in scheduler.groups.running.items:
        if seq.group.num_cached:
            blocks += seq.block_table[: seq.group.num_cached // size]
    return size * (len(blocks) - len(set(blocks)))


class Replica:
    def __init__(
        self,
        index: int,
        scheduler: Scheduler,
        times: StepTimes,
        costs: ServingCosts | None = None,
        *,
        ahead: int = 0,
        drafts: SimulatedDrafts | None = None,
    ) -> None:
        self.index = index
        self.scheduler = scheduler
        self.costs = costs or ServingCosts()
        self.num_steps = 0
        self.busy_seconds = 0.0
        self.queue_seconds = 0.0  # waiting sequences, over time
        self.max_queue = 0
        self.goes_on: float | None = None  # when the engine's loop does; None: it waits for requests
        self.requests: dict[str, SimulatedRequest] = {}  # in flight
        self.load = 0  # how many these are: routers ask all replicas
        self._reader_free = 0.0  # when the server of a CPU has read all that came
        self._starting: list[SimulatedRequest] = []  # admitted, and without a token
        self._ended: list[SimulatedRequest] = []
        self._times, self._ahead, self._drafts = times, ahead, drafts
        self._sampled: dict[int, SampledRow] = {}  # by row: what it yields whenever it samples
        self._known: dict[int, int] = {}  # tokens of each row
        self._steps: deque[StepInFlight] = deque()
        self._device_free = 0.0
        self._recent = RecentRate()
        self._num_alike = 0  # steps from here on that only decode
        self._next_work = StepWork()  # of the first of these
        self._num_shared: int | None = None  # as in StepWork; None: sequences came or went

    @property
    def clock(self) -> float:
        """Seconds: when the next step begins, if one is planned now."""
        return max(self.goes_on or 0.0, self._device_free)

    @property
    def costs(self) -> ServingCosts:
        return self._costs

    @costs.setter
    def costs(self, costs: ServingCosts) -> None:
        self._costs = costs
        self.server = ServerLoop(costs) if costs.taken or costs.stream else None

    def receive(self, now: float) -> float:
        """-> when a request that came now reaches the engine of a CPU: its server reads one after the other."""
        begins = max(now, self._reader_free)
        self._reader_free = begins + self.costs.request / 2
        return begins

    def add(self, request: SimulatedRequest, now: float) -> None:
        request.replica = self.index
        submitted = request.as_request()
        self.scheduler.add(submitted, now)
        self.requests[submitted.id] = request
        self.load += 1
        if self.goes_on is None:
            self.goes_on = now
        else:  # the loop takes it, while the device may wait; on a CPU, a core that computes reads it
            self.goes_on += self.costs.arrival

    def take_ended(self) -> list[SimulatedRequest]:
        """The requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return [*ended, *self.server.take_ended()] if self.server else ended

    def step(self) -> None:
        """One turn of the engine's loop."""
        assert self.goes_on is not None
        began = now = self.goes_on
        if self.scheduler.has_work and not (self._drafts and self.scheduler.awaits_output):
            plan = self.scheduler.schedule()
            now = self._submit(plan, now)
            if plan.runs and len(self._steps) <= self._ahead:
                self.goes_on = now
                return
        if not self._steps:
            self.goes_on = None
            return
        step = self._steps.popleft()
        now = max(now, step.ends)
        self._finish(step, now)
        self.goes_on = now if self._ahead else now + self.costs.step
        waiting = len(self.scheduler.groups.waiting)
        self.queue_seconds += waiting * (self.goes_on - began)
        self.max_queue = max(self.max_queue, waiting)

    def sleeps_until(self) -> float:
        """Until then sequences only decode and none ends, unless a request comes. Steps become longer, if anything."""
        assert self.goes_on is not None
        self._num_alike = num_steps_alike(self.scheduler, self._steps[0].plan if self._steps else None)
        if self._num_alike < 1:
            return self.goes_on
        work, count = self._decoding(), self._num_alike
        self._next_work = work
        seconds = self._times.seconds(work)
        if not self._steps:
            return self.goes_on + seconds * count
        by_host = self.goes_on + self._host_seconds(work.num_rows) * count
        return max(self.goes_on, by_host, self._steps[0].ends + seconds * (count - 1))

    def catch_up(self, until: float) -> None:
        """Make the steps that it slept through."""
        if self.goes_on is not None and self.goes_on < until:
            self.goes_on = self._decode_until(self.goes_on, until)

    # -- time

    def _host_seconds(self, num_sampled: int) -> float:
        """The time that the engine's loop takes for one step, beside that of the device."""
        return self.costs.step + self.costs.row * num_sampled

    def _run(self, plan: StepPlan, work: StepWork, output: StepOutput, launched: float) -> tuple[float, float]:
        """-> when the device has done a step, and how long it took."""
        num_swapped = len(plan.swap_in) + len(plan.swap_out)
        begins = max(launched, self._device_free)
        if self._ahead:
            work.recent = self._recent.at(begins)
        seconds = self._times.seconds(work) + self.costs.swapped_block * num_swapped + output.draft_seconds
        if self._ahead:
            self._recent.add(work.num_tokens, begins, seconds)
        else:
            seconds += self.costs.row * len(output.sampled)  # streams are written by the cores that compute
        self._device_free = ends = begins + seconds
        self.busy_seconds += seconds
        self.num_steps += 1
        return ends, seconds

    # -- a step

    def _submit(self, plan: StepPlan, now: float) -> float:
        """-> when the engine's loop has done so"""
        drafts = self._drafts
        for admission in plan.admitted:
            request = self.requests[self.scheduler.rows[admission.row].group.id]
            self._known[admission.row] = len(admission.tokens)
            self._sampled[admission.row] = SampledRow(admission.row, [request.token])
            if not request.has_begun and request not in self._starting:  # the request may have been preempted
                self._starting.append(request)
            if drafts:
                drafts.admit(admission.row)
        if plan.admitted or plan.retired:
            self._num_shared = None
        output = StepOutput(plan.step, self._verify(plan) if drafts else self._sample(plan))
        if drafts:
            drafts.propose(plan, output, self._known)
        work = StepWork.of(plan, len(output.sampled))
        work.num_shared = self._shared()
        launched = now
        if self._ahead:
            host = self._host_seconds(len(output.sampled)) + (self.costs.prompts if work.num_chunks else 0.0)
            launched, now = now + LAUNCHED * host, now + host
        ends, seconds = now, 0.0
        if plan.runs:
            ends, seconds = self._run(plan, work, output, launched)
        self._steps.append(StepInFlight(plan, work.num_chunks > 0, ends, seconds, output))
        return now

    def _sample(self, plan: StepPlan) -> list[SampledRow]:
        sampled, known = [], self._known
        for run in plan.runs:
            end, row = run.start + run.count, run.row
            if end == known[row]:
                known[row] = end + 1
                sampled.append(self._sampled[row])
        return sampled

    def _verify(self, plan: StepPlan) -> list[SampledRow]:
        """Accept the drafts that are what the sequence has, up to the first that is not, and sample a token after them.
        The scheduler also compares drafts that did not run with what was sampled."""
        sampled = []
        for run in plan.runs:
            if run.start + run.count - len(run.drafts) == self._known[run.row]:
                (token,) = self._sampled[run.row].tokens
                num_accepted = run.drafts.index(WRONG) if WRONG in run.drafts else len(run.drafts)
                self._known[run.row] += num_accepted + 1
                sampled.append(SampledRow(run.row, [token] * (num_accepted + 1)))
        return sampled

    def _finish(self, step: StepInFlight, now: float) -> None:
        begun, ended = [], []
        for event in self.scheduler.update(step.output):
            request = self.requests[event.request_id]
            if not request.has_begun:
                begun.append(request)
                self._starting.remove(request)
                request.has_begun = True
            if event.final:
                request.num_cached = event.num_cached
                ended.append(self.requests.pop(event.request_id))
                self.load -= 1
        if step.plan.runs:
            self._tell(now, len(step.output.sampled), begun, ended)
        self.scheduler.record_step(step.plan, step.seconds)

    def _tell(self, now: float, num_sampled: int, begun: list[SimulatedRequest], ended: list[SimulatedRequest]) -> None:
        """A step has ended, with the first tokens of some requests and the last of others."""
        if self.server:
            self.server.tell(Message(now, num_sampled, begun, ended))
            return
        for request in begun:
            request.first_token = now
        for request in ended:
            request.finished = now
        self._ended += ended

    # -- many steps at once

    def _decode_until(self, now: float, horizon: float) -> float:
        """Make the steps of decoding until `horizon` that differ in nothing but time. -> when the engine goes on"""
        running, count, work = self.scheduler.groups.running.items, 0, self._next_work
        rows, began, step = len(running), now, self._steps[0] if self._steps else None
        last_ends, seconds = step.ends if step else 0.0, 0.0
        host = self._host_seconds(rows) if self._ahead else 0.0
        streams, sampled = 0.0 if self._ahead else self.costs.row * rows, len(step.output.sampled) if step else 0
        if step and step.has_prompts:
            self.scheduler.record_step(step.plan, step.seconds)
            step.has_prompts = False
        while count < self._num_alike and now < horizon:  # as `_run`, without a call for each step
            begins = max(now + LAUNCHED * host, self._device_free)
            if self._ahead:
                work.recent = self._recent.at(begins)
            seconds = self._times.seconds(work) + streams
            if self._ahead:
                self._recent.add(work.num_tokens, begins, seconds)
            self._device_free = ends = begins + seconds
            self.busy_seconds += seconds
            work.num_read += rows
            work.num_pairs += rows
            count += 1
            if step:
                now, last_ends = max(now + host, last_ends), ends
                begun = self._begun() if self._starting else []
                if begun or self.server:
                    self._tell(now, sampled, begun, [])
                sampled = rows
            else:
                now = ends + self.costs.step
        self.num_steps += count
        self.queue_seconds += len(self.scheduler.groups.waiting) * (now - began)
        self._num_alike -= count
        skip_steps(self.scheduler, step.plan if step else None, count, self._token)
        for seq in running:
            self._known[seq.row] += count
        if step:
            step.ends, step.seconds = last_ends, seconds
            step.output = StepOutput(step.plan.step, [self._sampled[seq.row] for seq in running])
        return now

    def _begun(self) -> list[SimulatedRequest]:
        """Those of which the step in flight has sampled the first token. One that was preempted does not run."""
        running = {seq.group.id for seq in self.scheduler.groups.running.items}
        begun = [request for request in self._starting if str(request.number) in running]
        for request in begun:
            request.has_begun = True
            self._starting.remove(request)
        return begun

    def _decoding(self) -> StepWork:
        """The next step, if all sequences decode."""
        running = self.scheduler.groups.running.items
        read = sum([seq.num_computed for seq in running]) + len(running)
        return StepWork(len(running), len(running), read, read, num_shared=self._shared())

    def _shared(self) -> int:
        if self._num_shared is None:
            self._num_shared = num_shared_tokens(self.scheduler)
        return self._num_shared

    def _token(self, seq: Sequence) -> int:
        return self._sampled[seq.row].tokens[0]
