"""Speculative decoding in the scheduler: draft tokens join runs, are verified, and are rolled back where rejected."""

from collections import Counter
from typing import Any

from quire.core.draft_budget import DraftBudget
from quire.core.draft_tree import MAX_TREE_NODES, accepted_path, followed_drafts, without_chain
from quire.core.kv_blocks import KVBlocks
from quire.core.limits import SchedulerLimits
from quire.core.plan import Run, SampledRow, StepPlan
from quire.core.row_table import RowTable
from quire.core.sequence import Sequence


class Speculation:
    """Adds to a step the draft tokens that pay, from memory that no prompt has reserved."""

    def __init__(self, limits: SchedulerLimits, kv_blocks: KVBlocks, rows: RowTable, ahead: int) -> None:
        self.budget = DraftBudget(ahead)
        self._limits = limits
        self._kv_blocks = kv_blocks
        self._rows = rows
        self.num_drafts = 0  # runs with draft tokens
        self.num_draft_tokens = 0
        self.num_accepted = 0  # draft tokens
        self.accepted_at: Counter[int] = Counter()  # accepted draft tokens by position in their draft

    def add_drafts(self, plan: StepPlan, behind: list[Sequence]) -> int:
        """Extend runs of one token by drafts; returns how many tokens. `behind` are sequences with reserved blocks."""
        runs = [(run, seq) for run in plan.runs if (seq := self._rows[run.row]).drafts and not seq.num_placeholders]
        if not runs:
            return 0
        offers = [(seq.acceptance, self._max_drafts(seq)) for _, seq in runs]
        max_tokens = (self._limits.max_num_batched_tokens - len(plan.runs)) // 2  # the other half is for prompts
        reserved = sum(self._kv_blocks.num_reserved_blocks(seq) for seq in behind if seq.running)
        num_spare = self._kv_blocks.pool.num_available - reserved  # blocks
        num_drafts = 0
        for (run, seq), count in zip(runs, self.budget.choose(offers, len(plan.runs), max_tokens), strict=True):
            if self._kv_blocks.num_new_blocks(seq, seq.num_computed + count) > num_spare:
                count = min(count, len(seq.block_table) * self._limits.block_size - seq.num_computed)
            if count > 0:
                num_spare -= self._extend(run, seq, count, plan)
                num_drafts += count
        return num_drafts

    def _max_drafts(self, seq: Sequence) -> int:
        """Draft tokens that fit before the end of the sequence and into one chunk."""
        fitting = min(len(seq.drafts), seq.group.length - seq.num_known - 1, self._limits.max_chunk - 1)
        return min(fitting, MAX_TREE_NODES) if seq.draft_parents else fitting

    def _extend(self, run: Run, seq: Sequence, count: int, plan: StepPlan) -> int:
        """Add `count` draft tokens to a run; returns how many blocks they take."""
        run.drafts = seq.drafts[:count]
        run.parents = without_chain(seq.draft_parents[:count])
        run.count += count
        seq.add_placeholders(count)
        seq.num_computed += count
        num_blocks = self._kv_blocks.num_new_blocks(seq, seq.num_computed)
        self._kv_blocks.allocate(seq, seq.num_computed, plan)
        run.new_blocks += seq.take_unsent_blocks()
        return num_blocks

    def should_wait(self, seq: Sequence) -> bool:
        """Whether the next step leaves `seq` out, so that the step after it verifies drafts."""
        return self.budget.should_wait(seq.acceptance, seq.drafts)

    def verify(self, seq: Sequence, sampled: SampledRow, run: Run | None) -> None:
        """Roll back the rejected drafts of `run`, and update the acceptance rate, also by drafts that did not run."""
        if run is not None:
            seq.drop_placeholders(len(run.drafts))
            self._kv_blocks.roll_back(seq, run.start + self._num_kept(seq, sampled, run))
            self._count(len(run.drafts), len(sampled.tokens) - 1)
        if sampled.tokens:
            tree = (run.drafts, run.parents) if run is not None else (seq.drafts, seq.draft_parents)
            seq.acceptance.update(followed_drafts(*tree, sampled.tokens), sampled.tokens)
            seq.drafts, seq.draft_parents = sampled.drafts, sampled.parents

    @staticmethod
    def _num_kept(seq: Sequence, sampled: SampledRow, run: Run) -> int:
        """Tokens of `run` whose keys and values are where they belong: the known one, and the accepted drafts. If the
        sequence has lost its row meanwhile, the runner has not moved those that a tree had elsewhere."""
        if not run.parents or seq.row == run.row:
            return len(sampled.tokens)
        path = accepted_path(run.drafts, run.parents, sampled.tokens)
        return 1 + next((place for place, node in enumerate(path) if place != node), len(path))

    def _count(self, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted += num_accepted
        self.accepted_at.update(range(num_accepted))

    def stats(self) -> dict[str, Any]:
        """The fields of `SchedulerStats` about drafts."""
        return {
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted,
            "accepted_at": [self.accepted_at[position] for position in range(len(self.accepted_at))],
        }
