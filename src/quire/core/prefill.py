"""Prefill: chunks of the sequences that lack more than one token, and admission of waiting sequences.

A sequence without a row is computed like any other: it takes a row in the plan that computes its first chunk."""

from dataclasses import dataclass

from quire.core.beam_steps import start_beams
from quire.core.live_groups import LiveGroups
from quire.core.plan import Admission, Run, StepPlan
from quire.core.preemption import Preemption
from quire.core.sequence import Sequence


@dataclass(slots=True)
class PrefillBudget:
    """Tokens of prompts that a step has left. Resumed sequences may have more: a client waits within their answer."""

    others: int
    resumed: int  # of these and of the others, in all


class Prefill:
    """Adds chunks to a plan, and counts the prompt tokens that the prefix cache saves."""

    def __init__(self, groups: LiveGroups, preemption: Preemption) -> None:
        self._groups = groups
        self._limits = groups.limits
        self._kv_blocks = groups.kv_blocks
        self._tiers = groups.kv_blocks.tiers
        self._remote = groups.kv_blocks.remote
        self._sends = groups.kv_blocks.sends
        self._rows = groups.rows
        self._adapters = groups.adapters
        self._preemption = preemption
        self.num_queries = 0  # prompt tokens looked up in the prefix cache
        self.num_hits = 0  # prompt tokens that were in it

    def catch_up(self, seq: Sequence, budget: PrefillBudget, plan: StepPlan) -> bool:
        """Plan the next chunk of a running sequence, if the budget has tokens for it. -> whether there were blocks

        A sequence that gets no blocks has preempted all behind it, so none of them overtakes it in this step."""
        left = budget.resumed if seq.group.resumed else budget.others
        if left <= 0:
            return True
        before = seq.num_computed
        if seq.row < 0 and before == 0:
            self._kv_blocks.attach_prefix(seq)
        elif before % self._limits.block_size == 0:
            self._kv_blocks.extend_prefix_hit(seq)  # another sequence may have computed these tokens meanwhile
            self._count_hits(seq, before)
        self._kv_blocks.free_behind_window(seq)
        num_tokens = self._chunk_size(seq, left)
        num_blocks = self._kv_blocks.num_new_blocks(seq, seq.num_computed + num_tokens)
        if not self._preemption.make_room(seq, num_blocks, plan):
            return False
        self._add_run(seq, num_tokens, plan, budget)
        return True

    def admit(self, plan: StepPlan, budget: PrefillBudget, num_reserved: int, first_in_flight: int) -> None:
        """Start waiting sequences in policy order, while all known tokens of each fit beside `num_reserved` blocks.

        A sequence without a slot for its LoRA adapter, or whose blocks are being fetched, is skipped: sequences behind
        it may start. A sequence that was preempted after the step `first_in_flight` was planned waits for the tokens
        that are in flight."""
        if self._groups.fair is not None and self._rows.num_unreserved:
            self._groups.fair.reorder(self._groups.waiting)
        skipped: set[str] = set()  # adapters
        num_fetching = 0
        waiting, index = self._groups.waiting.items, 0
        while index < len(waiting):
            seq = waiting[index]
            group = seq.group
            left = budget.resumed if group.resumed else budget.others
            if left <= 0:
                return
            if seq.planned_step >= first_in_flight or group.num_rows > self._rows.num_unreserved:
                return
            if not self._adapters.has_room(group.adapter, skipped):
                skipped.add(group.adapter)
                index += 1
                continue
            awaits_disk = self._tiers and seq.prefill is None and self._tiers.awaits_blocks(seq, plan)
            if awaits_disk or (self._remote and self._remote.awaits_blocks(seq, plan)):
                index += 1
                num_fetching += group.num_rows
                if num_fetching >= self._rows.num_unreserved:
                    return  # more could not start when their blocks are there
                continue
            before = seq.num_computed
            if not self._kv_blocks.try_admit(seq, num_reserved):
                return
            del waiting[index]
            self._start(seq, plan)
            self._count_hits(seq, before)
            if self._tiers and not group.preempted and not seq.num_prefills:
                self._tiers.count_hits(seq)
            self._add_run(seq, self._chunk_size(seq, left), plan, budget)
            num_reserved += self._kv_blocks.num_reserved_blocks(seq)

    def fetch(self, plan: StepPlan, num_tokens: int) -> None:
        """Begin the fetches of those waiting sequences that the next plan could admit if they were read by then:
        `num_tokens` of all of them that are left to compute."""
        assert self._tiers is not None
        num_rows = 0
        for seq in self._groups.waiting.items:
            num_rows += seq.group.num_rows
            if num_tokens <= 0 or num_rows > self._rows.num_unreserved:
                return
            fetched = 0
            if seq.prefill is None and self._tiers.awaits_blocks(seq, plan) and seq.fetch is not None:
                fetched = len(seq.fetch.blocks) * self._limits.block_size
            num_tokens -= max(len(seq.tokens) - fetched, 1)

    def _start(self, seq: Sequence, plan: StepPlan) -> None:
        group = seq.group
        if (slot := self._adapters.assign_slot(group.adapter)) is not None:
            plan.adapters.append((slot, group.adapter))
        self._rows.num_unreserved -= group.num_rows
        self._groups.start(seq)
        if group.search is not None:
            start_beams(self._groups, group)
        if not group.started:
            self._groups.mark_admitted(group)
            self.num_queries += group.num_prompt_ids

    def _chunk_size(self, seq: Sequence, budget: int) -> int:
        """Tokens to compute now. A chunk inside the prompt ends with a full block if it can: only full blocks are
        shared. The input of an encoder is computed in one step, even beyond the budget."""
        missing = len(seq.tokens) - seq.num_computed
        size = min(missing, budget, self._limits.long_prefill_token_threshold or missing)
        if seq.num_computed < seq.group.num_encoder_slots:
            size = max(size, seq.group.num_encoder_slots)
        if size < missing:
            excess = (seq.num_computed + size) % self._limits.block_size
            return size - excess if excess < size else size
        return size

    def _add_run(self, seq: Sequence, num_tokens: int, plan: StepPlan, budget: PrefillBudget) -> None:
        budget.resumed -= num_tokens
        budget.others = min(budget.others - (0 if seq.group.resumed else num_tokens), budget.resumed)
        start, end = seq.num_computed, seq.num_computed + num_tokens
        self._kv_blocks.allocate(seq, end, plan)
        run = Run(seq.row, start, num_tokens)
        if self._kv_blocks.states:
            self._kv_blocks.states.plan_run(seq, run)
        seq.num_computed = end
        seq.planned_step = plan.step
        self._kv_blocks.index_full_blocks(seq)
        if self._sends:
            self._sends.note_computed(seq)
        if seq.row < 0:
            self._take_row(seq, plan)
        run.row, run.new_blocks = seq.row, seq.take_unsent_blocks()
        plan.runs.append(run)

    def _take_row(self, seq: Sequence, plan: StepPlan) -> None:
        group = seq.group
        self._rows.take(seq, plan.step)
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
                adapter=self._adapters[group.adapter],
                mu=seq.mu,
                namespace=group.namespace,
            )
        )

    def _count_hits(self, seq: Sequence, before: int) -> None:
        """Count the prompt tokens from position `before` on that came from the cache, once for a group."""
        group = seq.group
        if seq is group.leader and not group.preempted:
            hits = min(seq.num_computed, group.num_prompt_ids) - min(before, group.num_prompt_ids)
            hits = max(hits - seq.num_remote, 0)
            seq.num_remote = 0
            group.num_cached += hits
            self.num_hits += hits
