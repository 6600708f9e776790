"""The sequence groups in the engine, from `add()` to their final event, and the queues of their sequences.

A sequence that stops running or ends gives back here what it holds: its row, its blocks and its LoRA adapter."""

from collections import Counter
from heapq import heappop, heappush
from itertools import count as count_from

from quire.core.adapters import AdapterSlots
from quire.core.errors import BadRequest, QueueFull
from quire.core.fair_order import FairOrder
from quire.core.kv_blocks import KVBlocks
from quire.core.kv_checks import check_memory
from quire.core.limits import SchedulerLimits, refuse_impossible
from quire.core.plan import StepPlan
from quire.core.policy import Policy, PolicyQueue
from quire.core.request import FinishReason, Request, SequenceEvent
from quire.core.row_table import RowTable
from quire.core.sequence import Sequence
from quire.core.sequence_group import SequenceGroup


class LiveGroups:
    """A live sequence runs, waits in the queue, or waits outside of the queue for its group's prompt."""

    def __init__(
        self,
        limits: SchedulerLimits,
        policy: Policy,
        kv_blocks: KVBlocks,
        rows: RowTable,
        adapters: AdapterSlots,
        fair: FairOrder | None = None,
    ) -> None:
        """`fair`: counts what tenants are served, where the policy is fair."""
        self.fair = fair
        self.limits = limits
        self.policy = policy
        self.kv_blocks = kv_blocks
        self.rows = rows
        self.adapters = adapters
        self.running = PolicyQueue()
        self.waiting = PolicyQueue()
        self.num_sequences = 0  # live, of all groups
        self._groups: dict[str, SequenceGroup] = {}  # by request id
        self._num_queued = 0  # groups that were never admitted
        self._deadlines: list[tuple[float, str]] = []  # a heap; a group that has ended stays until its deadline
        self._events: list[SequenceEvent] = []  # of groups that ended in `add()`, for the next `take_events()`
        self._numbers = count_from()

    @property
    def has_work(self) -> bool:
        return bool(self._groups or self._events)

    def uses(self, adapter: str) -> bool:
        """Whether a live group asks for this LoRA adapter."""
        return any(group.adapter == adapter for group in self._groups.values())

    # ---- requests come and go

    def add(self, request: Request, now: float) -> None:
        """Queue a request, or raise BadRequest, PromptTooLong or QueueFull."""
        if request.id in self._groups:
            raise BadRequest(f"a request with the id `{request.id}` is in flight", "choose another id", param="id")
        kv_blocks, states = self.kv_blocks, self.kv_blocks.states
        max_running = states.max_running if states else self.limits.max_num_seqs
        num_blocks = kv_blocks.pool.num_blocks
        refuse_impossible(request, self.limits, num_blocks, kv_blocks.window, max_running, states is None)
        if self._num_queued >= self.limits.max_queued:
            raise QueueFull(f"{self._num_queued} requests are waiting, which is the limit", "try again later")
        group = SequenceGroup(request, self.policy(request, next(self._numbers)), self.limits)
        self._groups[group.id] = group
        self._num_queued += 1
        if self.fair is not None:
            self.fair.arrives(group)
        num_samples = 1 if group.search else request.params.num_samples
        for sample in range(num_samples):
            output = request.resumed[sample] if group.resumed else []
            group.live.append(Sequence(group, sample, group.prompt + output))
            if group.resumed and request.resumed_mu:
                group.live[-1].mu = request.resumed_mu[sample]
        self.num_sequences += num_samples
        group.awaiting_prompt = list(group.live)
        self._end_finished(group)
        self.queue_leader(group)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.id))
            self._events += self.expire(now)

    def _end_finished(self, group: SequenceGroup) -> None:
        """End the samples of a resumed request whose delivered tokens are complete."""
        for seq in group.awaiting_prompt[:]:
            if seq.num_known > group.num_prompt and (reason := group.finish_reason(seq.tokens[-1], seq.num_known)):
                event = group.event(seq.sample)
                event.finish_reason = reason
                event.stop_token = seq.tokens[-1] if reason == "stop" else None
                self._events += self.end(seq, event)

    def cancel(
        self, request_id: str, index: int | None = None, reason: str = "the request was cancelled"
    ) -> list[SequenceEvent]:
        """End a request, or one of its samples, now. A request that has ended is left alone."""
        if (group := self._groups.get(request_id)) is None:
            return []
        if index is None or group.search is not None:  # beams are not samples: they end together
            return self.abort(group, "cancelled", reason)
        for seq in group.live:
            if seq.sample == index:
                event = group.event(index)
                event.finish_reason, event.reason = "cancelled", reason
                return self.end(seq, event)
        return []

    def expire(self, now: float) -> list[SequenceEvent]:
        """End the requests whose deadline has passed."""
        events: list[SequenceEvent] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heappop(self._deadlines)
            group = self._groups.get(request_id)
            if group is not None and group.deadline == deadline:
                events += self.cancel(request_id, reason="the deadline of the request has passed")
        return events

    def take_events(self) -> list[SequenceEvent]:
        events, self._events = self._events, []
        return events

    # ---- sequences start and stop

    def queue_leader(self, group: SequenceGroup) -> None:
        """Let the first sequence that has no prompt yet wait in the queue; it will compute the prompt."""
        group.leader = group.awaiting_prompt.pop(0) if group.awaiting_prompt else None
        if group.leader is not None:
            self.waiting.push(group.leader)

    def mark_admitted(self, group: SequenceGroup) -> None:
        """The group is admitted for the first time."""
        group.started = True
        self._num_queued -= 1
        if self.fair is not None:
            self.fair.admitted(group)

    def start(self, seq: Sequence) -> None:
        seq.running = True
        self.adapters.hold(seq.group.adapter)
        self.running.push(seq)

    def stop(self, seq: Sequence) -> None:
        """Take a sequence off the running queue and off its row; it keeps its blocks."""
        self.running.remove(seq)
        seq.running = False
        self.adapters.release(seq.group.adapter)
        self.rows.retire(seq)
        if seq.group.prompt_owner is seq:
            seq.group.prompt_owner = None

    def set_prompt_owner(self, seq: Sequence) -> None:
        """`seq` has computed the prompt: the samples that waited for it join the queue and will fork from `seq`."""
        group = seq.group
        group.prompt_owner = seq
        for follower in group.awaiting_prompt:
            self.waiting.push(follower)
        group.awaiting_prompt = []

    def replace_beams(self, group: SequenceGroup, beams: list[Sequence]) -> None:
        """Run `beams`, which hold their blocks already, instead of the group's live sequences."""
        for seq in group.live:
            seq.ended = True
            self.stop(seq)
            self.kv_blocks.release(seq)
        for seq in beams:
            self.start(seq)
        self.num_sequences += len(beams) - len(group.live)
        group.live = beams
        group.leader = beams[0]

    # ---- sequences end

    def end(self, seq: Sequence, event: SequenceEvent) -> list[SequenceEvent]:
        """End one sample with `event`."""
        group = seq.group
        self._remove_sequence(seq)
        if not group.live:
            self._close(group)
        return group.deliver(event)

    def abort(self, group: SequenceGroup, finish_reason: FinishReason, reason: str) -> list[SequenceEvent]:
        """End all sequences of a group."""
        events = group.abort(finish_reason, reason)
        self.remove_group(group)
        return events

    def remove_group(self, group: SequenceGroup) -> None:
        for seq in group.live[:]:
            self._remove_sequence(seq)
        self._close(group)

    def _remove_sequence(self, seq: Sequence) -> None:
        """Take a sequence out of its queue, its row, its blocks and its group."""
        group = seq.group
        seq.ended = True
        if seq.running:
            self.stop(seq)
            if group.search is None:
                self.rows.num_unreserved += 1
        elif seq in group.awaiting_prompt:
            group.awaiting_prompt.remove(seq)
        else:
            self.waiting.remove(seq)
        self.kv_blocks.release(seq)
        group.num_output += seq.num_known - group.num_prompt
        group.live.remove(seq)
        self.num_sequences -= 1
        if seq is group.leader:
            self.queue_leader(group)

    def _close(self, group: SequenceGroup) -> None:
        del self._groups[group.id]
        if self.fair is not None:
            self.fair.ended(group)
        if not group.started:
            self._num_queued -= 1
        if group.holds_rows:
            self.rows.num_unreserved += group.num_rows

    def check(self, num_sampling: int, plans: list[StepPlan]) -> None:
        """Assert every invariant of sequences and what they hold, given the plans in flight. A row has at most
        `num_sampling` tokens in flight."""
        self.running.check()
        self.waiting.check()
        groups = self._groups.values()
        live = [seq for group in groups for seq in group.live]
        awaiting = [seq for group in groups for seq in group.awaiting_prompt]
        assert self.num_sequences == len(live), f"{len(live)} sequences are live, and {self.num_sequences} are counted"
        places = Counter(map(id, (*self.running.items, *self.waiting.items, *awaiting)))
        assert places == Counter(map(id, live)), "a sequence is not in exactly one of running, waiting, awaiting_prompt"
        for seq in live:
            name = f"sample {seq.sample} of {seq.group.id}"
            assert seq.running == (seq in self.running.items), f"{name} does not know whether it runs"
            assert seq.running or (seq.row < 0 and not seq.block_table), f"{name} waits, and has a row or blocks"
            assert not seq.running or seq.group.search or seq.row >= 0, f"{name} runs without a row"
            assert seq.num_computed <= len(seq.tokens), f"{name} has computed more tokens than it has"
            assert seq.num_placeholders <= num_sampling, f"{name} has placeholders that no step in flight samples"
            assert seq.num_blocks_sent <= len(seq.block_table), f"more blocks of {name} were sent than it has"
        reserved = sum(group.num_rows for group in groups if group.holds_rows)
        self.rows.check(live, reserved + sum(seq.group.search is None for seq in self.running.items))
        self.adapters.check(seq.group.adapter for seq in self.running.items)
        assert self._num_queued == sum(not group.started for group in groups), "the queued groups are miscounted"
        check_memory(self.kv_blocks, live, plans)
