"""One engine on a virtual clock: its scheduler, and the steps that are in flight on its device."""

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from quire.core.draft_policy import ANY_METHOD
from quire.core.params import SamplingParams
from quire.core.plan import Proposal, Run, SampledRow, StepOutput, StepPlan
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.planning.fast_forward import num_steps_alike, skip_steps
from quire.planning.step_times import ServingCosts, StepTimes, StepWork
from quire.planning.workload import Arrival

_OUTPUT_IDS = 1 << 48  # first of the token ids that outputs have: no prompt has them
_REQUEST_IDS = 1 << 24  # ids of one request's output; more than a context holds
_REJECTED = 1 << 62  # added to the id of a token that was drafted otherwise


@dataclass(slots=True)
class SimulatedRequest:
    """Times in seconds since the beginning."""

    number: int
    asked: Arrival
    replica: int = 0
    first_token: float = 0.0
    finished: float = 0.0
    num_cached: int = 0

    @property
    def arrival(self) -> float:
        return self.asked.time

    @property
    def num_prompt(self) -> int:
        return len(self.asked.prompt_ids)

    @property
    def num_output(self) -> int:
        return self.asked.output

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        return (self.finished - self.first_token) / max(1, self.num_output - 1)

    @property
    def latency(self) -> float:
        return self.finished - self.arrival

    @property
    def first_id(self) -> int:
        """The id of its token at a position is this and the position: no other request has it."""
        return _OUTPUT_IDS + self.number * _REQUEST_IDS

    def output_ids(self) -> list[int]:
        first = self.first_id + self.num_prompt
        return list(range(first, first + self.num_output))

    def as_request(self) -> Request:
        return Request(
            id=str(self.number), prompt_ids=list(self.asked.prompt_ids), params=_params(self.num_output),
            arrival=self.arrival, priority=self.asked.priority,
        )  # fmt: skip


@lru_cache(4096)
def _params(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True)


@dataclass(slots=True)
class SimulatedDrafts:
    """Draft tokens offered for each sequence, and how likely each is accepted if those before it were."""

    num_tokens: int
    acceptance: float
    rng: Random


@dataclass(slots=True)
class StepInFlight:
    plan: StepPlan
    work: StepWork
    ends: float
    seconds: float
    output: StepOutput


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
        self._ended: list[SimulatedRequest] = []
        self._times, self._ahead, self._drafts = times, ahead, drafts
        self._by_row: dict[int, SimulatedRequest] = {}
        self._known: dict[int, int] = {}  # tokens of each row
        self._steps: deque[StepInFlight] = deque()
        self._device_free = 0.0
        self._num_alike = 0  # steps from here on that only decode
        self._num_shared: int | None = None  # as in StepWork; None: sequences came or went

    @property
    def load(self) -> int:
        """Requests in flight."""
        return len(self.requests)

    def add(self, request: SimulatedRequest, now: float) -> None:
        request.replica = self.index
        submitted = request.as_request()
        self.scheduler.add(submitted, now)
        self.requests[submitted.id] = request
        self.goes_on = now if self.goes_on is None else self.goes_on
        if not self._ahead:
            self.goes_on += self.costs.request  # it is received by the cores that compute

    def take_ended(self) -> list[SimulatedRequest]:
        """The requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def step(self) -> None:
        """What the engine's loop does once."""
        assert self.goes_on is not None
        began = now = self.goes_on
        if self.scheduler.has_work:
            plan = self.scheduler.schedule()
            self._submit(plan, now)
            now += self._host_seconds(self._steps[-1].work) if self._ahead else 0.0
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
        seconds = self._times.seconds(work)
        if not self._steps:
            return self.goes_on + seconds * count
        by_host = self.goes_on + self._host_seconds(work) * count
        return max(self.goes_on, by_host, self._steps[0].ends + seconds * (count - 1))

    def catch_up(self, until: float) -> None:
        """Make the steps that it slept through."""
        if self.goes_on is not None and self.goes_on < until:
            self.goes_on = self._decode_until(self.goes_on, until)

    # -- time

    def _host_seconds(self, work: StepWork) -> float:
        """Of the engine's loop for one step, beside the device."""
        return self.costs.step + self.costs.row * work.num_rows

    def _run(self, work: StepWork, num_swapped: int, now: float) -> tuple[float, float]:
        """-> when the device has done a step that is submitted now, and how long it took."""
        seconds = self._times.seconds(work) + self.costs.swapped_block * num_swapped
        if not self._ahead:
            seconds += self.costs.row * work.num_rows  # streams are written by the cores that compute
        ends = max(now, self._device_free) + seconds
        self._device_free = ends
        self.busy_seconds += seconds
        self.num_steps += 1
        return ends, seconds

    # -- a step

    def _submit(self, plan: StepPlan, now: float) -> None:
        for admission in plan.admitted:
            self._known[admission.row] = len(admission.tokens)
            self._by_row[admission.row] = self.requests[self.scheduler.rows[admission.row].group.id]
        if plan.admitted or plan.retired:
            self._num_shared = None
        output = StepOutput(plan.step, self._sample(plan))
        work = StepWork.of(plan, len(output.sampled))
        work.num_shared = self._shared()
        ends, seconds = now, 0.0
        if plan.runs:
            ends, seconds = self._run(work, len(plan.swap_in) + len(plan.swap_out), now)
        self._steps.append(StepInFlight(plan, work, ends, seconds, output))

    def _sample(self, plan: StepPlan) -> list[SampledRow]:
        sampled, known, by_row = [], self._known, self._by_row
        if self._drafts is None:
            for run in plan.runs:
                end, row = run.start + run.count, run.row
                if end == known[row]:
                    known[row] = end + 1
                    sampled.append(SampledRow(row, [by_row[row].first_id + end]))
            return sampled
        for run in plan.runs:
            if run.start + run.count - len(run.drafts) == known[run.row]:
                sampled.append(self._verify(run, known[run.row], self._drafts))
                known[run.row] += len(sampled[-1].tokens)
        return sampled

    def _verify(self, run: Run, known: int, drafts: SimulatedDrafts) -> SampledRow:
        """Accept drafts as they are drawn, and sample a token after them. The scheduler also compares drafts that did
        not run with what was sampled."""
        first, accepted, offered = self._by_row[run.row].first_id, 0, len(run.drafts) or 1
        while accepted < offered and drafts.rng.random() < drafts.acceptance:
            accepted += 1
        accepted, rejected = min(accepted, len(run.drafts)), accepted < offered
        last = first + known + accepted + (_REJECTED if rejected else 0)
        tokens = [*run.drafts[:accepted], last]
        following = first + known + len(tokens)
        offered_tokens = list(range(following, following + drafts.num_tokens))
        return SampledRow(run.row, tokens, proposals=[Proposal(ANY_METHOD, offered_tokens)])

    def _finish(self, step: StepInFlight, now: float) -> None:
        for event in self.scheduler.update(step.output):
            request = self.requests[event.request_id]
            request.first_token = request.first_token or now
            if event.final:
                request.finished = now
                request.num_cached = event.num_cached
                self._ended.append(self.requests.pop(event.request_id))
        self.scheduler.record_step(step.plan, step.seconds)

    # -- many steps at once

    def _decode_until(self, now: float, horizon: float) -> float:
        """Make the steps of decoding until `horizon` that differ in nothing but time. -> when the engine goes on"""
        running, count, work = self.scheduler.groups.running.items, 0, self._decoding()
        rows, began = len(running), now
        step = self._steps[0] if self._steps else None
        last_ends, seconds = step.ends if step else 0.0, 0.0
        while count < self._num_alike and now < horizon:
            ends, seconds = self._run(work, 0, now)
            work.num_read += rows
            work.num_pairs += rows
            count += 1
            if step:
                now, last_ends = max(now + self._host_seconds(work), last_ends), ends
            else:
                now = ends + self.costs.step
        self.queue_seconds += len(self.scheduler.groups.waiting) * (now - began)
        self._num_alike -= count
        skip_steps(self.scheduler, step.plan if step else None, count, self._token_id)
        for seq in running:
            self._known[seq.row] += count
        if step:
            step.ends, step.seconds, step.work = last_ends, seconds, work
            step.output = StepOutput(
                step.plan.step,
                [SampledRow(seq.row, [self._token_id(seq, self._known[seq.row] - 1)]) for seq in running],
            )
        return now

    def _decoding(self) -> StepWork:
        """The next step, if all sequences decode."""
        running = self.scheduler.groups.running.items
        read = sum(seq.num_computed + 1 for seq in running)
        return StepWork(len(running), len(running), read, read, num_shared=self._shared())

    def _shared(self) -> int:
        """Of the cached tokens that running sequences read: those of prefixes that several of them have."""
        if self._num_shared is None:
            size, blocks = self.scheduler.limits.block_size, []
            for seq in self.scheduler.groups.running.items:
                if seq.group.num_cached:
                    blocks += seq.block_table[: seq.group.num_cached // size]
            self._num_shared = size * (len(blocks) - len(set(blocks)))
        return self._num_shared

    def _token_id(self, seq: Sequence, position: int) -> int:
        return self._by_row[seq.row].first_id + position
