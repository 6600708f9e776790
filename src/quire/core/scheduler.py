"""Who computes what in the next step.

One rule: every sequence catches up with what is known of it, within the token budget, in policy order. Running ones
that lack one token come first, then prompts under way, then waiting ones; nobody overtakes, but who waits for an
adapter is passed by. There is no clock, no tensor and no thread here, so the same object drives an engine, a test and a
simulation."""

from collections import Counter, deque
from collections.abc import Iterable

from quire.core.draft_budget import DraftBudget
from quire.core.limits import SchedulerLimits
from quire.core.live_groups import LiveGroups
from quire.core.plan import Admission, Run, SampledRow, StepOutput, StepPlan
from quire.core.records import SchedulerStats
from quire.core.request import SequenceEvent
from quire.core.sequence import Sequence
from quire.core.sequence_group import SequenceGroup
from quire.core.step_time import StepTimeController


class Scheduler(LiveGroups):
    """Call `schedule()`, carry the plan out, give its output to `update()`, and so on while `has_work`.

    `add`, `cancel` and `expire` may be called at any moment, also while a plan is being carried out. So may
    `schedule()`, if the executor takes plans `ahead` of the outputs of those before: a sequence then goes on from a
    token that is being drawn. If that token ends it, what was computed after it is thrown away."""

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
        drafts: bool = False,
    ) -> None:
        """`drafts`: whether outputs come with guesses at what follows."""
        super().__init__(
            limits,
            num_blocks,
            num_host_blocks=num_host_blocks,
            policy=policy,
            prefix_caching=prefix_caching,
            ahead=ahead,
            window=window,
            num_adapters=num_adapters,
        )
        self.step_time = StepTimeController(limits.step_seconds)
        self.drafting = DraftBudget(ahead) if drafts else None
        self._step = 0
        self._ahead = ahead
        self._in_flight: deque[tuple[StepPlan, list[Sequence | None]]] = deque()  # without outputs; who had which row
        self._num_preemptions = self._num_queries = self._num_hits = 0

    # ---- a step

    def schedule(self) -> StepPlan:
        """Let every sequence catch up with what is known of it, in policy order, within the token budget."""
        assert len(self._in_flight) <= self._ahead, "schedule() is called before the outputs of earlier plans have come"
        plan = StepPlan(self._step, [], self.rows.retired)
        self._step += 1
        num_preemptions = self._num_preemptions
        behind = self._continue(plan)
        num_planned = len(plan.runs) + (self._draft(plan, behind) if self.drafting else 0)
        budget = self.limits.max_num_batched_tokens - num_planned
        if plan.runs:  # somebody waits for these: prompts must not make the step long
            budget = min(budget, max(self.step_time.max_tokens - num_planned, self.limits.block_size))
        promised = 0  # blocks that prompts under way will need: they were admitted because these were there
        all_moved = True
        for seq in behind:
            if not seq.running:
                continue  # preempted for one before it
            taken = self._catch_up(seq, budget, plan)
            all_moved &= taken > 0
            budget -= taken
            promised += self.kv_blocks.num_reserved_blocks(seq)
        if all_moved and self._num_preemptions == num_preemptions:
            self._admit(plan, budget, promised)
        self.rows.retired = []
        self._in_flight.append((plan, self.rows.owners()))
        if self._ahead:
            self._expect(plan)
        return plan

    def _expect(self, plan: StepPlan) -> None:
        """Let the next plan go on from the tokens that this one draws, except where it is known to end or must wait."""
        for run in plan.runs:
            seq = self.rows[run.row]
            end, group = run.start + run.count, seq.group
            if (
                run.drafts
                or group.needs_last_token
                or (self.drafting and self.drafting.should_wait(seq.acceptance, seq.drafts))
            ):
                continue
            if end == len(seq.tokens) and end + 1 < group.length:
                seq.add_placeholders()

    def _continue(self, plan: StepPlan) -> list[Sequence]:
        """Plan one token for each running sequence that lacks just that; returns those that lack more, or a row."""
        runs, step, size, pool = plan.runs, plan.step, self.limits.block_size, self.kv_blocks.pool
        behind: list[Sequence] = []
        for seq in self.running.items:  # victims stand behind `seq`, so removing them does not disturb this loop
            start = seq.num_computed
            missing = len(seq.tokens) - start
            if missing != 1 or seq.row < 0:
                if missing and (seq.row >= 0 or start or seq.group.prompt_owner):
                    behind.append(seq)  # else a beam waits for the others, or for the prompt
                continue
            new_blocks: list[int] = []
            if start == len(seq.block_table) * size:
                self.kv_blocks.free_behind_window(seq)
                if pool.num_available == 0 and not self._make_room(seq, 1, plan):
                    continue  # it waits a step; what stands before it goes on, and may take its blocks
                seq.block_table.append(pool.take())
                new_blocks = seq.block_table[seq.num_blocks_sent :]
                seq.num_blocks_sent = len(seq.block_table)
            runs.append(Run(seq.row, start, 1, new_blocks))
            seq.num_computed = start + 1
            seq.planned_step = step
            if start + 1 == seq.index_at:
                self.kv_blocks.index_full_blocks(seq)
        behind.sort(key=lambda seq: seq.num_known - seq.num_computed > 1)  # beams lack one token and come first
        return behind

    def _draft(self, plan: StepPlan, behind: list[Sequence]) -> int:
        """Add drafts to runs of one token, where it pays and needs nothing that others need. -> how many"""
        assert self.drafting is not None
        runs = [(run, seq) for run in plan.runs if (seq := self.rows[run.row]).drafts and not seq.num_placeholders]
        if not runs:
            return 0
        most = self.limits.max_chunk - 1
        offers = [(seq.acceptance, min(len(seq.drafts), seq.group.length - seq.num_known - 1, most)) for _, seq in runs]
        room = (self.limits.max_num_batched_tokens - len(plan.runs)) // 2  # the other half is for prompts
        spare = self.kv_blocks.pool.num_available - sum(
            self.kv_blocks.num_reserved_blocks(seq) for seq in behind if seq.running
        )
        num_drafts = 0
        for (run, seq), count in zip(runs, self.drafting.choose(offers, len(plan.runs), room), strict=True):
            if self.kv_blocks.num_new_blocks(seq, seq.num_computed + count) > spare:
                count = min(count, len(seq.block_table) * self.limits.block_size - seq.num_computed)
            if count <= 0:
                continue
            run.drafts = seq.drafts[:count]
            run.count += count
            seq.add_placeholders(count)
            seq.num_computed += count
            spare -= self.kv_blocks.num_new_blocks(seq, seq.num_computed)
            self.kv_blocks.allocate(seq, seq.num_computed, plan)
            run.new_blocks += seq.block_table[seq.num_blocks_sent :]
            seq.num_blocks_sent = len(seq.block_table)
            num_drafts += count
        return num_drafts

    def _catch_up(self, seq: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan as many tokens of a running sequence as the budget allows; 0 if there is no room.

        Whoever finds no room has preempted all that stand behind it, so nobody overtakes it in the rest of the step."""
        if budget <= 0:
            return 0
        before = seq.num_computed
        if seq.row < 0 and before == 0:
            self.kv_blocks.attach_prefix(seq)
        elif before % self.limits.block_size == 0:
            self.kv_blocks.extend_prefix_hit(seq)  # another sequence may have computed the same meanwhile
            self._count_hits(seq, before)
        self.kv_blocks.free_behind_window(seq)
        wanted = self._chunk(seq, budget)
        if not self._make_room(seq, self.kv_blocks.num_new_blocks(seq, seq.num_computed + wanted), plan):
            return 0
        self._run(seq, wanted, plan)
        return wanted

    def _admit(self, plan: StepPlan, budget: int, promised: int) -> None:
        """Start waiting sequences, each only if all that is known of it fits beside what is promised already. One whose
        adapter has no slot is passed by: those behind it need not wait for that."""
        passed_by: set[str] = set()  # the adapters of those
        at = 0
        while at < len(self.waiting.items) and budget > 0:
            seq = self.waiting.items[at]
            group = seq.group
            before = seq.num_computed
            if self._in_flight and seq.planned_step >= self._in_flight[0][0].step:
                return  # preempted, and what was being drawn for it has not come
            if group.num_rows > self.rows.num_unreserved:
                return
            if not self.adapters.has_room(group.adapter, passed_by):
                passed_by.add(group.adapter)
                at += 1
                continue
            if not self.kv_blocks.try_admit(seq, promised):
                return
            del self.waiting.items[at]
            if (slot := self.adapters.assign_slot(group.adapter)) is not None:
                plan.adapters.append((slot, group.adapter))
            self.rows.num_unreserved -= group.num_rows
            self._join(seq)
            if group.search is not None:
                group.holds_rows = True
                for beam in group.awaiting_prompt:  # they begin once the leader has the prompt
                    self._join(beam)
                group.awaiting_prompt = []
            if not group.started:
                group.started = True
                self._num_queued -= 1
                self._num_queries += group.num_prompt_ids
            self._count_hits(seq, before)
            wanted = self._chunk(seq, budget)
            self._run(seq, wanted, plan)
            budget -= wanted
            promised += self.kv_blocks.num_reserved_blocks(seq)

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens to compute now. A chunk that does not reach the end stops at a block's end if it can: a full block can
        be shared, and wastes nothing. A source is read at once, be the budget what it may."""
        missing = len(seq.tokens) - seq.num_computed
        wanted = min(missing, budget, self.limits.long_prefill_token_threshold or missing)
        if seq.num_computed < seq.group.num_encoder_slots:
            wanted = max(wanted, seq.group.num_encoder_slots)
        if wanted < missing:
            over = (seq.num_computed + wanted) % self.limits.block_size
            return wanted - over if over < wanted else wanted
        return wanted

    def _run(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> None:
        start, end = seq.num_computed, seq.num_computed + num_tokens
        self.kv_blocks.allocate(seq, end, plan)
        seq.num_computed = end
        seq.planned_step = plan.step
        self.kv_blocks.index_full_blocks(seq)
        if seq.row < 0:
            self._take_row(seq, plan)
        plan.runs.append(Run(seq.row, start, num_tokens, seq.block_table[seq.num_blocks_sent :]))
        seq.num_blocks_sent = len(seq.block_table)

    def _take_row(self, seq: Sequence, plan: StepPlan) -> None:
        group = seq.group
        self.rows.take(seq, plan.step)
        seq.num_blocks_sent = len(seq.block_table)
        plan.admitted.append(
            Admission(
                row=seq.row,
                params=group.params_of(seq),
                sample=seq.sample,
                tokens=seq.tokens[:],
                num_prompt=group.num_prompt,
                blocks=seq.block_table[:],
                stop_ids=sorted(group.stop_ids),
                num_encoder_tokens=group.num_prompt_ids if group.num_encoder_slots else 0,
                adapter=self.adapters[group.adapter],
            )
        )

    def _count_hits(self, seq: Sequence, before: int) -> None:
        group = seq.group
        if seq is group.leader and not group.preempted:
            hits = min(seq.num_computed, group.num_prompt_ids) - min(before, group.num_prompt_ids)
            group.num_cached += hits
            self._num_hits += hits

    # ---- preemption

    def _make_room(self, seq: Sequence, num_blocks: int, plan: StepPlan) -> bool:
        """Preempt from the end of the policy order until there are `num_blocks`; False if none behind `seq` is left."""
        while self.kv_blocks.pool.num_available < num_blocks:
            victim = self._victim(seq, plan.step)
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _victim(self, seq: Sequence, step: int) -> Sequence | None:
        for other in reversed(self.running.items):
            if other.key <= seq.key:
                return None
            members: Iterable[Sequence] = other.group.live if other.group.search else (other,)
            if not any(member.planned_step == step or member is seq for member in members):
                return other
        return None

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Let a sequence (a search: all its beams) wait again, its blocks on the host if they fit there."""
        group = victim.group
        self._num_preemptions += 1
        self.rows.num_unreserved += group.num_rows
        group.preempted = True
        if group.search is not None:
            group.holds_rows = False
            for beam in group.live:
                self._stop(beam)
                beam.candidates = None
                self.kv_blocks.release(beam)
            group.awaiting_prompt = list(group.live)
            self._choose_leader(group)
            return
        self._stop(victim)
        if self.kv_blocks.can_swap_out(victim):
            self.kv_blocks.swap_out(victim, plan)
        else:
            self.kv_blocks.release(victim)
        self.waiting.push(victim)

    # ---- what a step yielded

    def update(self, output: StepOutput) -> list[SequenceEvent]:
        """Take in what the plan yielded; returns what the clients are to be told."""
        plan, owners = self._in_flight.popleft()
        assert output.step == plan.step, f"the output of step {output.step} comes instead of that of step {plan.step}"
        events, self._events = self._events, []
        drafted = {run.row: run for run in plan.runs if run.drafts} if self.drafting else {}
        for drawn in output.sampled:
            seq = owners[drawn.row]
            assert seq is not None
            if seq.ended:
                continue  # cancelled while the step ran, or the token before this one was its last
            group = seq.group
            if drawn.error:
                events += self._abort(group, "error", drawn.error)
                continue
            if group.search is not None:
                events += self._search(seq, drawn, plan)
                continue
            if self.drafting:
                self._verified(seq, drawn, drafted.get(drawn.row))
            if group.forced_eos_id is not None and drawn.tokens and seq.num_known + len(drawn.tokens) == group.length:
                drawn = group.force_eos(drawn)
            event = SequenceEvent(
                request_id=group.id,
                index=seq.sample,
                tokens=drawn.tokens,
                logprobs=drawn.logprobs,
                num_cached=group.num_cached,
            )
            if drawn.prompt_logprobs is not None:
                event.prompt_logprobs = group.new_prompt_logprobs(seq, drawn, _end_of_run(plan, drawn.row))
            if drawn.tokens:
                self._gain(seq, event)
                if seq.index_at <= seq.num_computed:
                    self.kv_blocks.index_full_blocks(seq)  # a block was waiting for this token
                if group.shares_prompt and group.prompt_owner is None and seq.running:
                    self._open_source(seq)
            if event.finish_reason is not None:
                event.stop_token = event.tokens[-1] if event.finish_reason == "stop" else None
                if drawn.logprobs is not None and group.from_start:
                    event.cumulative_logprob = seq.cumulative_logprob
                events += self._end(seq, event)
            elif group.ranked:
                group.deliver(event)
            elif event.tokens or event.prompt_logprobs:
                events.append(event)
        return events

    def _gain(self, seq: Sequence, event: SequenceEvent) -> None:
        """Append the tokens of `event` as far as the one that ends the sequence, if one does."""
        group = seq.group
        for count, token in enumerate(event.tokens, 1):
            seq.append(token)
            if event.logprobs is not None:
                seq.cumulative_logprob += event.logprobs[count - 1][0].logprob
            if token in group.stop_ids or seq.num_known >= group.length:
                event.finish_reason = group.finish_reason(token, seq.num_known)
                if event.finish_reason is not None:
                    del event.tokens[count:]
                    if event.logprobs is not None:
                        del event.logprobs[count:]
                    return

    def _verified(self, seq: Sequence, drawn: SampledRow, run: Run | None) -> None:
        """Learn from the drafts, computed or not, and take back those of a run that were wrong."""
        assert self.drafting is not None
        if run is not None:
            seq.drop_placeholders(len(run.drafts))
            self.kv_blocks.roll_back(seq, run.start + len(drawn.tokens))
            self.drafting.count_verified(len(run.drafts), len(drawn.tokens) - 1)
        if drawn.tokens:
            seq.acceptance.update(run.drafts if run is not None else seq.drafts, drawn.tokens)
            seq.drafts = drawn.drafts

    def _open_source(self, seq: Sequence) -> None:
        """The prompt is computed: the samples that waited for it may start."""
        group = seq.group
        group.prompt_owner = seq
        for follower in group.awaiting_prompt:
            self.waiting.push(follower)
        group.awaiting_prompt = []

    def _search(self, seq: Sequence, drawn: SampledRow, plan: StepPlan) -> list[SequenceEvent]:
        """A beam has its continuations. Once all have, the search goes on with the best, on new rows."""
        group = seq.group
        assert group.search is not None
        if drawn.prompt_logprobs is not None:
            group.new_prompt_logprobs(seq, drawn, _end_of_run(plan, drawn.row))
        if drawn.beams is None or plan.step < seq.admitted_step:
            return []  # of a beam that was preempted meanwhile they are found again
        seq.candidates = drawn.beams
        if group.prompt_owner is None:
            group.prompt_owner = seq
        candidates = [beam.candidates for beam in group.live if beam.candidates is not None]
        if len(candidates) < len(group.live):
            return []
        parents = group.search.advance(candidates)
        if group.search.done:
            for beam in group.live[:]:
                self._leave(beam)
            self._close(group)
            return group.search_results()
        self._replace_beams(group, parents)
        return []

    def _replace_beams(self, group: SequenceGroup, parents: list[int]) -> None:
        """New beams from their parents: the first child goes on in its parent's blocks, the others fork from them."""
        assert group.search is not None
        old = group.live
        group.live = []
        first_child: dict[int, Sequence] = {}
        for sample, (parent, beam) in enumerate(zip(parents, group.search.beams, strict=True)):
            child = Sequence(group, sample, [*old[parent].tokens, beam.tokens[-1]])
            if parent in first_child:
                self.kv_blocks.fork(child, first_child[parent], old[parent].num_computed)
            else:
                self.kv_blocks.move_blocks(child, old[parent])
                first_child[parent] = child
            group.live.append(child)
        for seq in old:
            seq.ended = True
            self._stop(seq)
            self.kv_blocks.release(seq)
        for seq in group.live:
            self._join(seq)
        self._num_live += len(group.live) - len(old)
        group.leader = group.live[0]

    # ---- seen from outside

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took: later ones are planned by it."""
        if plan.num_tokens - plan.num_drafts > len(plan.runs):
            self.step_time.record_step(plan.num_tokens, seconds)
        elif self.drafting and plan.runs:
            self.drafting.step_cost.record_step(plan.num_tokens, seconds)

    @property
    def num_preemptions(self) -> int:
        return self._num_preemptions

    def stats(self) -> SchedulerStats:
        pool, size = self.kv_blocks.pool, self.limits.block_size
        held = pool.num_blocks - pool.num_available
        unused = sum(
            len(seq.block_table) * size - seq.num_computed for seq in self.running.items if seq.copy_from is None
        )
        return SchedulerStats(
            running=len(self.running),
            waiting=self._num_live - len(self.running),
            num_blocks=pool.num_blocks,
            held_blocks=held,
            cached_blocks=pool.num_cached,
            held_slots=held * size,
            used_slots=held * size - unused,
            preemptions=self._num_preemptions,
            prefix_queries=self._num_queries,
            prefix_hits=self._num_hits,
            **(self.drafting.stats() if self.drafting else {}),
        )

    def check(self) -> None:
        """Every invariant, with a sentence for each that is broken. Between steps only; takes a while."""
        self.running.check()
        self.waiting.check()
        groups = self._groups.values()
        live = [seq for group in groups for seq in group.live]
        unstarted = [seq for group in groups for seq in group.awaiting_prompt]
        assert self._num_live == len(live), f"{len(live)} sequences are alive, and {self._num_live} counted"
        places = Counter(map(id, (*self.running.items, *self.waiting.items, *unstarted)))
        assert places == Counter(map(id, live)), "a sequence is not in exactly one of running, waiting and unstarted"
        runs = [plan.runs for plan, _ in self._in_flight]
        num_awaited = sum(max((len(run.drafts) for run in each), default=0) or 1 for each in runs)
        for seq in live:
            name = f"sample {seq.sample} of {seq.group.id}"
            assert seq.running == (seq in self.running.items), f"{name} does not know whether it runs"
            assert seq.running or (seq.row < 0 and not seq.block_table), f"{name} waits, and has a row or blocks"
            assert not seq.running or seq.group.search or seq.row >= 0, f"{name} runs without a row"
            assert seq.num_computed <= len(seq.tokens), f"{name} has computed more than there is"
            assert seq.num_placeholders <= num_awaited, f"{name} waits for tokens that nobody draws"
            assert seq.num_blocks_sent <= len(seq.block_table), f"the runner knows more blocks of {name} than there are"
        kept = sum(group.num_rows for group in groups if group.holds_rows)
        self.rows.check(live, kept + sum(seq.group.search is None for seq in self.running.items))
        self.adapters.check(seq.group.adapter for seq in self.running.items)
        assert self._num_queued == sum(not group.started for group in groups), "the queue is miscounted"
        assert 0 <= self._num_hits <= self._num_queries, f"{self._num_hits} hits in {self._num_queries} tokens"
        self.kv_blocks.check(live)


def _end_of_run(plan: StepPlan, row: int) -> int:
    return next(run.start + run.count for run in plan.runs if run.row == row)
