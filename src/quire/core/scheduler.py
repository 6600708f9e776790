"""Which positions of which sequences each step computes.

One rule: every sequence catches up with what is known of it, in policy order, within the token budget. Running
sequences that lack one token come first (decode), then running ones that lack more (prefill), then waiting ones. No
sequence overtakes another, unless the other waits for a LoRA adapter's slot. No clock, tensor or thread is used."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from quire.core.adapters import AdapterSlots
from quire.core.beam_steps import advance_beams
from quire.core.draft_policy import DraftPolicy
from quire.core.fair_order import FairOrder
from quire.core.kv_blocks import KVBlocks
from quire.core.kv_sends import BlockSender
from quire.core.kv_tiers import BlockStore
from quire.core.limits import SchedulerLimits
from quire.core.live_groups import LiveGroups
from quire.core.plan import Run, SampledRow, StepOutput, StepPlan
from quire.core.policy import find_policy
from quire.core.preemption import Preemption
from quire.core.prefill import Prefill, PrefillBudget
from quire.core.records import SchedulerStats
from quire.core.remote_prefills import PrefillEngines
from quire.core.request import Request, SequenceEvent
from quire.core.row_table import RowTable
from quire.core.sequence import PLACEHOLDER, Sequence
from quire.core.sliding_window import SlidingWindow
from quire.core.speculation import Speculation
from quire.core.step_time import StepTimeController

RESUMED_SHARE = 2  # tokens of resumed sequences for each that decodes, even where steps are too long already


@dataclass(slots=True)
class _InFlightStep:
    plan: StepPlan
    owners: list[Sequence | None]  # by row, when the plan was made


class Scheduler:
    """Call `schedule()`, run the plan, give its output to `update()`, and repeat while `has_work`.

    `add`, `cancel` and `expire` may be called at any time, also while a plan runs. With async scheduling (`ahead` > 0)
    so may `schedule()`: the next plan computes tokens that are still being sampled. Where such a token ends its
    sequence, what was computed behind it is dropped."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        *,
        num_host_blocks: int = 0,
        policy: str = "fcfs",
        prefix_caching: bool = True,
        ahead: int = 0,
        micro_batches: int = 1,
        window: int = 0,
        num_adapters: int = 0,
        drafts: DraftPolicy | None = None,
        store: BlockStore | None = None,
        offload: bool = False,
        block_bytes: int = 0,
        prefill_engines: PrefillEngines | None = None,
        block_sender: BlockSender | None = None,
        num_slots: int = 0,
        num_host_slots: int = 0,
        host_slot_bytes: int = 0,
        num_checkpoint_slots: int = 0,
        small_host_slots: bool = False,
        num_pages: int = 0,
        page_window: int = 0,
        page_bytes: int = 0,
        write_through: bool = False,
    ) -> None:
        """`ahead`: plans in flight beside the one whose output comes next. `micro_batches`: where there are several,
        sequences that decode are divided among them, and none is in two plans in flight before its token is known.
        `window`: tokens that attention looks back, 0: all. `drafts`: how draft tokens are chosen; None: there are none.
        `store`: prefix blocks on disk; `write_through`: they are saved as they fill. `offload`: host blocks keep
        prefixes, too. `block_bytes`, `host_slot_bytes`: of a block and of a host slot. `prefill_engines` compute
        prompts for this one. `block_sender`: this one computes prompts for others. `num_slots`: state slots, of models
        with recurrent layers; `num_host_slots`: to swap to;
        `num_checkpoint_slots`: of checkpoints that are smaller than states; `small_host_slots`: those of the host are,
        too. `num_pages`: window pages, of models in which some layers have a window, `page_window` the largest."""
        self.limits = limits
        sliding_window = SlidingWindow(window, limits.block_size, max_chunk=limits.max_chunk, ahead=ahead)
        self.kv_blocks = KVBlocks(
            num_blocks,
            num_host_blocks,
            sliding_window,
            prefix_caching,
            store,
            offload,
            block_bytes,
            prefill_engines,
            block_sender,
            limits.has_states,
            num_slots,
            limits.max_num_seqs,
            num_host_slots,
            host_slot_bytes,
            num_checkpoint_slots,
            small_host_slots,
            num_pages,
            SlidingWindow(page_window, limits.block_size, max_chunk=limits.max_chunk, ahead=ahead)
            if num_pages
            else None,
            limits.max_step_tokens,
            page_bytes,
            write_through,
        )
        self.states, self.pages = self.kv_blocks.states, self.kv_blocks.pages
        self.tiers, self.remote, self.sends = self.kv_blocks.tiers, self.kv_blocks.remote, self.kv_blocks.sends
        self.rows = RowTable(self.states.max_running if self.states else limits.max_num_seqs)
        self.adapters = AdapterSlots(num_adapters)
        fair = FairOrder() if policy == "fair" else None
        self.groups = LiveGroups(limits, find_policy(policy), self.kv_blocks, self.rows, self.adapters, fair)
        self.preemption = Preemption(self.groups)
        self.prefill = Prefill(self.groups, self.preemption)
        self.speculation = Speculation(drafts, limits, self.kv_blocks, self.rows, ahead) if drafts else None
        self.step_time = StepTimeController(limits.step_seconds)
        self._ahead = ahead
        self._micro_batches = micro_batches
        self._step = 0
        self._in_flight: deque[_InFlightStep] = deque()  # oldest first

    # ---- requests

    @property
    def has_work(self) -> bool:
        has_sends = self.sends is not None and self.sends.can_send
        return self.groups.has_work or has_sends or (self.tiers is not None and self.tiers.has_unsaved)

    def add(self, request: Request, now: float) -> None:
        """Queue a request, or raise BadRequest, PromptTooLong or QueueFull."""
        self.groups.add(request, now)

    def cancel(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        """End a request, or one of its samples, now. A request that has ended is left alone."""
        return self.groups.cancel(request_id, index)

    def expire(self, now: float) -> list[SequenceEvent]:
        """End the requests whose deadline has passed, and waits for the disk that take too long."""
        if self.tiers:
            self.tiers.expire(now)
        if self.remote:
            self.remote.now = now
        return self.groups.expire(now)

    def take_transfers(self, done: Iterable[tuple[int, int] | int], now: float) -> None:
        """What the store has ended: (fetch, blocks read), or a host block that was saved."""
        assert self.tiers is not None
        self.tiers.now = now
        for each in done:
            if isinstance(each, int):
                self.tiers.saved(each)
            else:
                self.tiers.fetched(*each)

    def uses(self, adapter: str) -> bool:
        """Whether a live request asks for this LoRA adapter."""
        return self.groups.uses(adapter)

    # ---- schedule

    def reset_prefix_cache(self, tenant: str) -> bool:
        """Forget the prefixes of a tenant, but for those that running sequences hold. -> whether none is left"""
        self.kv_blocks.pool.drop_cached(tenant)
        if self.tiers:
            self.tiers.clear(tenant)
        return not self.kv_blocks.tree.holds(tenant)

    def schedule(self) -> StepPlan:
        """Let every sequence catch up with what is known of it, in policy order, within the token budget."""
        assert len(self._in_flight) <= self._ahead, "schedule() is called before the outputs of earlier plans have come"
        plan = StepPlan(self._step, [])
        self._step += 1
        if self.states:
            self.states.begin_plan(plan)
        if self.pages:
            self.pages.begin_plan()
        if self.tiers:
            self.tiers.save(plan, is_idle=not self.groups.has_work)
        if self.sends:
            self.sends.send(plan)
        num_preemptions = self.preemption.count
        behind = self._decode(plan)
        num_coming = len(behind) + min(len(self.groups.waiting.items), self.rows.num_unreserved)  # prompts
        num_seqs = len(plan.runs) + num_coming
        num_drafts = self.speculation.add_drafts(plan, behind, num_coming > 0) if self.speculation else 0
        budget = self._prefill_budget(len(plan.runs) + num_drafts, behind)
        num_reserved = 0  # blocks that running prompts still need: they were admitted because these were free
        all_moved = True
        for seq in behind:
            if not seq.running:
                continue  # preempted by a sequence before it
            all_moved &= self.prefill.catch_up(seq, budget, plan)
            num_reserved += self.kv_blocks.num_reserved_blocks(seq)
        if self.groups.waiting.items and all_moved and self.preemption.count == num_preemptions:
            first_in_flight = self._in_flight[0].plan.step if self._in_flight else plan.step
            self.prefill.admit(plan, budget, num_reserved, first_in_flight)
        if self.speculation:
            self.speculation.set_quotas(plan, num_coming, num_seqs)
        plan.retired = self.rows.take_retired()
        self._in_flight.append(_InFlightStep(plan, self.rows.owners()))
        if self._ahead and self._micro_batches == 1:
            self._add_placeholders(plan)
        return plan

    def plan_fetches(self) -> StepPlan | None:
        """A plan that computes nothing: waiting sequences begin to fetch blocks from the disk, which the next plan may
        find there. None: there is nothing to fetch. No plan may be in flight."""
        assert not self._in_flight, "a plan of fetches comes while another one is in flight"
        if self.tiers is None or not self.groups.waiting.items:
            return None
        plan = StepPlan(self._step, [])
        num_running = len(self.groups.running.items)
        self.prefill.fetch(plan, self._max_prefill(num_running, is_resuming=self.groups.waiting.items[0].group.resumed))
        if not plan.fetches:
            return None
        self._step += 1
        self._in_flight.append(_InFlightStep(plan, self.rows.owners()))
        return plan

    @property
    def awaits_output(self) -> bool:
        """Whether a plan made now would be empty, since every sequence is in flight, or would part drafts that one step
        can verify."""
        if not self._in_flight or self.groups.waiting.items:
            return False
        ready = [seq for seq in self.groups.running.items if len(seq.tokens) != seq.num_computed]
        if not ready or self.speculation is None or self._micro_batches > 1:
            return not ready
        latest = self._in_flight[-1]
        return self.speculation.should_gather(ready, latest.plan, latest.owners)

    @property
    def num_planned(self) -> int:
        """Steps so far."""
        return self._step

    def skip(self, count: int) -> None:
        """Count steps that a simulation has made by itself."""
        self._step += count
        self.rows.take_retired()

    def _decode(self, plan: StepPlan) -> list[Sequence]:
        """Plan one token for each running sequence that lacks one; returns the sequences that lack more, or a row."""
        runs, step, size, pool = plan.runs, plan.step, self.limits.block_size, self.kv_blocks.pool
        behind: list[Sequence] = []
        most = -(-len(self.groups.running.items) // self._micro_batches)
        for seq in self.groups.running.items:  # victims of preemption stand behind `seq`: removing them is safe here
            start = seq.num_computed
            missing = len(seq.tokens) - start
            if missing != 1 or seq.row < 0:
                if missing and (seq.row >= 0 or start or seq.group.prompt_owner):
                    behind.append(seq)  # else a beam waits for the other beams, or for the prompt
                continue
            if len(runs) == most:
                continue  # the next micro-batch has it
            new_blocks: list[int] = []
            if start == len(seq.block_table) * size:
                self.kv_blocks.free_behind_window(seq)
                if pool.num_available == 0 and not self.preemption.make_room(seq, 1, plan):
                    continue  # it waits a step; sequences before it go on, and may preempt it
                seq.block_table.append(pool.take())
                new_blocks = seq.take_unsent_blocks()
                if self.pages:
                    self.pages.cover(seq, start + 1, plan)
            run = Run(seq.row, start, 1, new_blocks)
            runs.append(run)
            if self.states:
                self.states.plan_run(seq, run)
            seq.num_computed = start + 1
            seq.planned_step = step
            if start + 1 == seq.index_at:
                self.kv_blocks.index_full_blocks(seq)
            if self.sends:
                self.sends.note_computed(seq)  # the last token of a prompt may come alone
        behind.sort(key=lambda seq: seq.num_known - seq.num_computed > 1)  # beams lack one token and come first
        return behind

    def _prefill_budget(self, num_planned: int, behind: list[Sequence]) -> PrefillBudget:
        """Tokens left for prompts. While sequences decode, prompts may not make their step long."""
        most = share = self._max_prefill(num_planned, is_resuming=False)
        if self._micro_batches > 1:
            share = self._micro_batch_share(most, behind)
        if not any(seq.group.resumed for seq in chain(behind, self.groups.waiting.items[:1])):
            return PrefillBudget(share, share)
        return PrefillBudget(share, share + self._max_prefill(num_planned, is_resuming=True) - most)

    def _max_prefill(self, num_planned: int, *, is_resuming: bool) -> int:
        most = max(self.limits.max_num_batched_tokens - num_planned, 0)
        if num_planned:
            least = max(self.limits.block_size, RESUMED_SHARE * num_planned * is_resuming)
            most = min(most, max(self.step_time.max_tokens(is_resuming) - num_planned, least))
        return most

    def _micro_batch_share(self, budget: int, behind: Iterable[Sequence]) -> int:
        """Tokens of prompts, such that all that wait are divided among the micro-batches that are not in flight."""
        num_free = max(1, self._micro_batches - len(self._in_flight))
        missing = 0
        for seq in chain(behind, self.groups.waiting.items):
            missing += len(seq.tokens) - seq.num_computed
            if missing >= num_free * budget:
                return budget
        return min(budget, max(-(-missing // num_free), self.limits.block_size))

    def _add_placeholders(self, plan: StepPlan) -> None:
        """Let the next plan compute the tokens that this one samples, unless a sequence ends or must know its token."""
        for run in plan.runs:
            seq = self.rows[run.row]
            end, group = run.start + run.count, seq.group
            if group.needs_last_token or (self.speculation and self.speculation.should_wait(run, seq)):
                continue
            if end == len(seq.tokens) and end + 1 < group.length:
                seq.tokens.append(PLACEHOLDER)
                seq.num_placeholders += 1

    # ---- update

    def update(self, output: StepOutput) -> list[SequenceEvent]:
        """Append the tokens that the oldest plan in flight sampled; returns the events for the clients."""
        step = self._in_flight.popleft()
        plan, owners = step.plan, step.owners
        if plan.has_swaps:
            self.kv_blocks.release_swapped(plan)
        assert output.step == plan.step, f"the output of step {output.step} comes instead of that of step {plan.step}"
        events = self.groups.take_events()
        if self.speculation:
            self.speculation.record_drafting(output)
        drafted = {run.row: run for run in plan.runs if run.drafts} if self.speculation else {}
        for sampled in output.sampled:
            seq = owners[sampled.row]
            assert seq is not None
            if seq.ended:
                continue  # cancelled while the step ran, or ended by the token before
            if sampled.error:
                events += self.groups.abort(seq.group, "error", sampled.error)
            elif seq.group.search is not None:
                events += self._advance_search(seq, sampled, plan)
            else:
                run = None
                if self.speculation:
                    run = drafted.get(sampled.row)
                    self.speculation.verify(seq, sampled, run, plan.step)
                self._take_sampled(seq, sampled, plan, run, events)
        return events

    def _take_sampled(
        self, seq: Sequence, sampled: SampledRow, plan: StepPlan, drafted: Run | None, events: list[SequenceEvent]
    ) -> None:
        """Append what one row sampled to its sequence, and to `events` what its client is to know of it. `drafted`: its
        run, if that had draft tokens."""
        group = seq.group
        if group.forced_eos_id is not None and sampled.tokens and seq.num_known + len(sampled.tokens) == group.length:
            sampled = group.force_eos(sampled)
        event = SequenceEvent(
            request_id=group.id,
            index=seq.sample,
            tokens=sampled.tokens,
            logprobs=sampled.logprobs,
            num_cached=group.num_cached,
            mu=sampled.mu,
        )
        if drafted is not None:
            event.verified.append((len(drafted.drafts), len(sampled.tokens) - 1))
        if sampled.prompt_logprobs is not None:
            event.prompt_logprobs = group.new_prompt_logprobs(seq, sampled, _end_of_run(plan, sampled.row))
        if sampled.tokens:
            seq.mu = sampled.mu
            self._append(seq, event)
            if seq.index_at <= seq.num_computed:
                self.kv_blocks.index_full_blocks(seq)  # a full block waited for this token to be known
            if group.shares_prompt and group.prompt_owner is None and seq.running:
                self.groups.set_prompt_owner(seq)
        if event.finish_reason is not None:
            event.stop_token = event.tokens[-1] if event.finish_reason == "stop" else None
            if sampled.logprobs is not None and not group.resumed:
                event.cumulative_logprob = seq.cumulative_logprob
            if self.speculation:
                self.speculation.record_output(seq.num_known - group.num_prompt)
            events += self.groups.end(seq, event)
        elif group.ranked:
            group.deliver(event)
        elif event.tokens or event.prompt_logprobs:
            events.append(event)

    def _append(self, seq: Sequence, event: SequenceEvent) -> None:
        """Append the tokens of `event` up to the one that ends the sequence, if one does."""
        group, num_known, logprobs = seq.group, len(seq.tokens) - seq.num_placeholders, event.logprobs
        for count, token in enumerate(event.tokens, 1):
            seq.append(token)
            if logprobs is not None:
                seq.cumulative_logprob += logprobs[count - 1][0].logprob
            if num_known + count >= group.length or token in group.stop_ids:
                event.finish_reason = group.finish_reason(token, num_known + count)
                if event.finish_reason is not None:
                    del event.tokens[count:]
                    if event.logprobs is not None:
                        del event.logprobs[count:]
                    return

    def _advance_search(self, seq: Sequence, sampled: SampledRow, plan: StepPlan) -> list[SequenceEvent]:
        if sampled.prompt_logprobs is not None:
            seq.group.new_prompt_logprobs(seq, sampled, _end_of_run(plan, sampled.row))
        if sampled.beams is None or plan.step < seq.admitted_step:
            return []  # preempted after this plan was made: the continuations are computed again
        return advance_beams(self.groups, seq, sampled.beams)

    # ---- measure

    def record_step(self, plan: StepPlan, seconds: float, gap: float = 0.0) -> None:
        """Learn from how long a step took: steps with prompts bound later ones, the others tell what drafts cost.
        `gap`: from the end of the step before to the plan of this one, which could not be made earlier."""
        if self.tiers:
            self.tiers.record_step(seconds)
        num_tokens = plan.num_tokens
        has_prompts = num_tokens - (plan.num_drafts if self.speculation else 0) > len(plan.runs)
        if has_prompts:
            self.step_time.record_step(num_tokens, seconds)
            if self.tiers:
                self.tiers.record_prefill(num_tokens, seconds)
        if self.speculation:
            self.speculation.record_step(plan, seconds, gap, has_prompts)

    @property
    def num_preemptions(self) -> int:
        return self.preemption.count

    def stats(self) -> SchedulerStats:
        pool, size, running = self.kv_blocks.pool, self.limits.block_size, self.groups.running.items
        held = pool.num_blocks - pool.num_available
        unused = sum(len(seq.block_table) * size - seq.num_computed for seq in running if seq.copy_from is None)
        return SchedulerStats(
            running=len(running),
            waiting=self.groups.num_sequences - len(running),
            num_blocks=pool.num_blocks,
            block_size=size,
            held_blocks=held,
            cached_blocks=pool.num_cached,
            held_slots=held * size,
            used_slots=held * size - unused,
            preemptions=self.num_preemptions,
            prefix_queries=self.prefill.num_queries,
            prefix_hits=self.prefill.num_hits,
            tiers=self.tiers.stats() if self.tiers else {},
            transfers=transfers.stats() if (transfers := self.remote or self.sends) else None,
            **(self.speculation.stats() if self.speculation else {}),
        )

    def check(self) -> None:
        """Assert every invariant, each with a sentence. For tests, between steps: it takes a while."""
        plans = [step.plan for step in self._in_flight]
        num_sampling = sum(max((len(run.drafts) for run in plan.runs), default=0) or 1 for plan in plans)
        self.groups.check(num_sampling, plans)
        num_hits, num_queries = self.prefill.num_hits, self.prefill.num_queries
        assert 0 <= num_hits <= num_queries, f"{num_hits} prefix hits in {num_queries} prompt tokens"


def _end_of_run(plan: StepPlan, row: int) -> int:
    return next(run.start + run.count for run in plan.runs if run.row == row)
