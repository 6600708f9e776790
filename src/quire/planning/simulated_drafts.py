"""Draft tokens of a simulation: how many are right, and what it takes to propose them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from random import Random

from quire.core.draft_policy import ANY_METHOD
from quire.core.plan import Proposal, Run, StepOutput, StepPlan
from quire.planning.step_times import StepTimes, StepWork

WRONG = 1 << 62  # a draft token that is not sampled: no output has it


@dataclass(slots=True)
class _DraftedRow:
    """A sequence as the model that drafts knows it."""

    num_read: int  # leading tokens whose keys and values it has
    num_known: int = 0  # when drafts were proposed last: tokens,
    num_drafts: int = 0
    num_right: int = 0  # and how many of the drafts were right


@dataclass(slots=True)
class DraftingSteps:
    """What the steps of a draft model, or of a head, compute, as `runtime/spec` has them: prompts beside the target's,
    what the target has sampled since, then one draft token of each sequence after the other."""

    times: StepTimes
    block_size: int
    max_tokens: int  # of one step
    is_head: bool = False
    _rows: dict[int, _DraftedRow] = field(default_factory=dict)

    def admit(self, row: int) -> None:
        self._rows.pop(row, None)

    def follow(self, plan: StepPlan, method: str) -> float:
        """Read the prompts of a step. -> seconds"""
        prompts = [run for run in plan.runs if run.count - len(run.drafts) > 1]
        has_prompt = any(self.is_head or method in run.quotas for run in prompts)
        for run in plan.runs:
            row = self._rows.setdefault(run.row, _DraftedRow(run.start))
            if has_prompt and row.num_read >= run.start and not run.drafts:
                row.num_read = max(row.num_read, run.start + run.count)
        return self.times.seconds(_reading(prompts if self.is_head else plan.runs)) if has_prompt else 0.0

    def propose(self, known: Mapping[int, int], counts: Mapping[int, int]) -> tuple[float, list[tuple[int, float]]]:
        """`known`: tokens of the rows that get drafts. -> seconds, and the steps that draft: (tokens, seconds)"""
        starts = {row: self._advance(row, num_known) for row, num_known in known.items()}
        in_all = 0.0
        if sum(known[row] - start for row, start in starts.items()) > self.max_tokens:
            in_all = self._catch_up(known, starts)
        steps = []
        for number in range(max(counts.values())):
            work = StepWork()
            for row, num_known in known.items():
                if counts[row] > number:
                    start = num_known + number - 1 if number else starts[row]
                    missing = num_known + number - start
                    work.add(start, missing, num_drafts=counts[row])  # a few tokens are no chunk of a prompt
                    work.num_rows += 1
            steps.append((work.num_tokens, self.times.seconds(work)))
        return in_all + sum(seconds for _, seconds in steps), steps

    def note(self, row: int, num_drafts: int, num_right: int) -> None:
        """Note the drafts that were proposed for a row."""
        self._rows[row].num_drafts, self._rows[row].num_right = num_drafts, num_right

    def _advance(self, row: int, num_known: int) -> int:
        """-> the first token that it has not read. Drafts that were right are read, but for the last: a head computes
        them again from the target's hidden states."""
        drafted = self._rows.setdefault(row, _DraftedRow(num_known - 1))
        if drafted.num_drafts:
            agreed = min(drafted.num_drafts - 1, drafted.num_right, num_known - drafted.num_known)
            in_blocks = -(-(drafted.num_known - 1) // self.block_size) * self.block_size
            drafted.num_read = drafted.num_known if self.is_head else min(drafted.num_known + agreed, in_blocks)
        start = min(drafted.num_read, num_known - 1)
        drafted.num_read, drafted.num_known, drafted.num_drafts = num_known, num_known, 0
        return start

    def _catch_up(self, known: Mapping[int, int], starts: dict[int, int]) -> float:
        """Read what is more than fits in a step, up to the last token of each row. -> seconds"""
        in_all = 0.0
        for row, num_known in known.items():
            while starts[row] < num_known - 1:
                count = min(self.max_tokens, num_known - 1 - starts[row])
                in_all += self.times.seconds(_reading([Run(row, starts[row], count)]))
                starts[row] += count
        return in_all


def _reading(runs: Iterable[Run]) -> StepWork:
    """Runs that are computed without logits."""
    work = StepWork()
    for run in runs:
        work.add(run.start, run.count, len(run.drafts))
    return work


@dataclass(slots=True)
class SimulatedDrafts:
    """Draft tokens offered for each sequence, and how likely each is accepted if those before it were."""

    num_tokens: int
    acceptance: float
    rng: Random
    method: str = ANY_METHOD
    steps: DraftingSteps | None = None  # None: proposing is free, and done for every sequence

    def admit(self, row: int) -> None:
        if self.steps:
            self.steps.admit(row)

    def propose(self, plan: StepPlan, output: StepOutput, known: Mapping[int, int]) -> None:
        """Add proposals to what a step sampled, and what they took. `known`: tokens by row."""
        counts = {row.row: self.num_tokens for row in output.sampled}
        if self.steps:
            quotas = {run.row: run.quotas.get(self.method, 0) for run in plan.runs}
            counts = {row: quotas[row] for row in counts if quotas[row]}
            output.draft_seconds = self.steps.follow(plan, self.method)
            if counts:
                seconds, steps = self.steps.propose({row: known[row] for row in counts}, counts)
                output.draft_seconds += seconds
                output.draft_steps = {self.method: steps}
        for sampled in output.sampled:
            if count := counts.get(sampled.row, 0):
                sampled.proposals = [Proposal(self.method, self._offer(sampled.row, sampled.tokens[0], count))]

    def _offer(self, row: int, token: int, count: int) -> list[int]:
        """Drafts for a sequence whose output is `token` again and again."""
        num_right = 0
        while num_right < count and self.rng.random() < self.acceptance:
            num_right += 1
        if self.steps:
            self.steps.note(row, count, num_right)
        return [token] * num_right + [WRONG] * (count - num_right)
