"""Requests under way: they come, they wait, they run, they end.

What a sequence holds (a row, blocks, an adapter, a place in a queue) is given back here, whatever it was doing."""

from heapq import heappop, heappush
from itertools import count as count_from

from quire.core.adapters import AdapterSlots
from quire.core.errors import BadRequest, QueueFull
from quire.core.kv_blocks import KVBlocks
from quire.core.limits import SchedulerLimits, refuse_impossible
from quire.core.policy import PolicyQueue, find_policy
from quire.core.request import FinishReason, Request, SequenceEvent
from quire.core.row_table import RowTable
from quire.core.sequence import Sequence
from quire.core.sequence_group import SequenceGroup
from quire.core.sliding_window import SlidingWindow


class LiveGroups:
    """Who is there, and who has what. Who computes when is the scheduler's."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        *,
        num_host_blocks: int = 0,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        ahead: int = 0,
        window: int = 0,
        num_adapters: int = 0,
    ) -> None:
        self.limits = limits
        self.policy = find_policy(policy)
        self.window = SlidingWindow(window, limits.block_size, max_chunk=limits.max_chunk, ahead=ahead)
        self.kv_blocks = KVBlocks(num_blocks, num_host_blocks, self.window, prefix_caching)
        self.adapters = AdapterSlots(num_adapters)
        self.rows = RowTable(limits.max_num_seqs)
        self.running = PolicyQueue()
        self.waiting = PolicyQueue()
        self._groups: dict[str, SequenceGroup] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; requests that have ended stay until their time
        self._events: list[SequenceEvent] = []  # to be returned by the next update()
        self._numbers = count_from()
        self._num_queued = 0  # requests never admitted
        self._num_live = 0  # sequences of all requests

    @property
    def has_work(self) -> bool:
        return bool(self._groups or self._events)

    # ---- requests come and go

    def add(self, request: Request, now: float) -> None:
        """Queue a request, or raise: BadRequest, PromptTooLong, QueueFull."""
        if request.id in self._groups:
            raise BadRequest(f"a request with the id `{request.id}` is under way", "choose another id", param="id")
        refuse_impossible(request, self.limits, self.kv_blocks.pool.num_blocks, self.window)
        if self._num_queued >= self.limits.max_queued:
            raise QueueFull(f"{self._num_queued} requests are waiting, which is the limit", "try again later")
        group = SequenceGroup(request, self.policy(request, next(self._numbers)), self.limits)
        self._groups[group.id] = group
        self._num_queued += 1
        num_samples = 1 if group.search else request.params.num_samples
        for sample in range(num_samples):
            output = [] if group.from_start else request.resumed[sample]
            group.live.append(Sequence(group, sample, group.prompt + output))
        self._num_live += num_samples
        group.awaiting_prompt = list(group.live)
        for seq in group.awaiting_prompt[:]:
            if seq.num_known > group.num_prompt and (reason := group.finish_reason(seq.tokens[-1], seq.num_known)):
                event = group.event(seq.sample)
                event.finish_reason = reason
                event.stop_token = seq.tokens[-1] if reason == "stop" else None
                self._events += self._end(seq, event)
        self._choose_leader(group)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.id))
            self._events += self.expire(now)

    def cancel(
        self, request_id: str, index: int | None = None, reason: str = "the request was cancelled"
    ) -> list[SequenceEvent]:
        """End a request, or one of its samples, now. Nothing happens if it has ended before."""
        if (group := self._groups.get(request_id)) is None:
            return []
        if index is not None and group.search is None:
            for seq in group.live:
                if seq.sample == index:
                    event = group.event(index)
                    event.finish_reason, event.reason = "cancelled", reason
                    return self._end(seq, event)
            return []
        return self._abort(group, "cancelled", reason)  # the beams of a search are no samples: they end together

    def expire(self, now: float) -> list[SequenceEvent]:
        """End the requests whose deadline has passed."""
        events: list[SequenceEvent] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, request_id = heappop(self._deadlines)
            group = self._groups.get(request_id)
            if group is not None and group.deadline == deadline:
                events += self.cancel(request_id, reason="the deadline of the request has passed")
        return events

    # ---- places

    def _join(self, seq: Sequence) -> None:
        seq.running = True
        self.adapters.hold(seq.group.adapter)
        self.running.push(seq)

    def _stop(self, seq: Sequence) -> None:
        """Out of the running queue and off its row."""
        self.running.remove(seq)
        seq.running = False
        self.adapters.release(seq.group.adapter)
        self.rows.retire(seq)
        if seq.group.prompt_owner is seq:
            seq.group.prompt_owner = None

    def uses(self, adapter: str) -> bool:
        """Whether a request under way asks for it."""
        return any(group.adapter == adapter for group in self._groups.values())

    # ---- ends

    def _end(self, seq: Sequence, event: SequenceEvent) -> list[SequenceEvent]:
        """One sample ends with `event`."""
        group = seq.group
        self._leave(seq)
        if not group.live:
            self._close(group)
        return group.deliver(event)

    def _abort(self, group: SequenceGroup, finish_reason: FinishReason, reason: str) -> list[SequenceEvent]:
        """All that is open of a request ends."""
        events = group.abort(finish_reason, reason)
        for seq in group.live[:]:
            self._leave(seq)
        self._close(group)
        return events

    def _leave(self, seq: Sequence) -> None:
        """Take a sequence out of everything, whatever it was doing."""
        group = seq.group
        seq.ended = True
        if seq.running:
            self._stop(seq)
            if group.search is None:
                self.rows.num_unreserved += 1
        elif seq in group.awaiting_prompt:
            group.awaiting_prompt.remove(seq)
        else:
            self.waiting.remove(seq)
        self.kv_blocks.release(seq)
        group.live.remove(seq)
        self._num_live -= 1
        if seq is group.leader:
            self._choose_leader(group)

    def _choose_leader(self, group: SequenceGroup) -> None:
        """The first that has not started computes the prompt; after that nobody leads."""
        group.leader = group.awaiting_prompt.pop(0) if group.awaiting_prompt else None
        if group.leader is not None:
            self.waiting.push(group.leader)

    def _close(self, group: SequenceGroup) -> None:
        del self._groups[group.id]
        if not group.started:
            self._num_queued -= 1
        if group.holds_rows:
            self.rows.num_unreserved += group.num_rows
