"""Speculative decoding in the scheduler: draft tokens join runs, are verified, and are rolled back where rejected."""

from collections import Counter
from typing import Any

from quire.core.acceptance import AcceptanceRate, MethodAcceptance
from quire.core.draft_budget import COST_MARGIN, DraftBudget, chain_probabilities
from quire.core.draft_policy import IDLE_INTERVAL, MAX_IDLE, DraftPolicy
from quire.core.draft_quotas import Asked, DraftQuotas
from quire.core.draft_tree import MAX_TREE_NODES, DraftTree, accepted_path, is_unknown, without_chain
from quire.core.kv_blocks import KVBlocks
from quire.core.limits import SchedulerLimits
from quire.core.plan import UNKNOWN, Proposal, Run, SampledRow, StepOutput, StepPlan
from quire.core.row_table import RowTable
from quire.core.sequence import Sequence


class Speculation:
    """Adds to a step the draft tokens that pay, from memory that no prompt has reserved, and asks for more of them."""

    def __init__(
        self, policy: DraftPolicy, limits: SchedulerLimits, kv_blocks: KVBlocks, rows: RowTable, ahead: int
    ) -> None:
        self.policy = policy
        self.budget = DraftBudget(policy.token_cost, ahead, policy.step_seconds)
        self._ahead = ahead
        self._limits = limits
        self._kv_blocks = kv_blocks
        self._rows = rows
        self._methods = {one.name: MethodAcceptance(one.acceptance, one.tree_nodes) for one in policy.methods}
        self._depths = {one.name: one.max_tokens for one in policy.methods}  # of trees, at most
        self._free = [method for method in policy.methods if method.is_free]
        self._quotas = [
            DraftQuotas(method, self._methods[method.name], policy, self.budget)
            for method in policy.methods
            if not method.is_free
        ]
        self._may_rest = not policy.synthetic and not policy.per_batch_size
        self._max_chunk = limits.max_chunk
        # Sequences, their proposals, the run that verified some of the first one, and the sampled tokens.
        self._unlearnt: list[tuple[Sequence, list[Proposal], Run | None, list[int]]] = []
        self._drafted: StepOutput | None = None  # whose times of drafting are unlearnt as well
        self._draft_seconds = 0.0  # of the last step
        self._device_seconds = 0.0  # of the last step, without drafting; 0: not known
        self._is_timed = True  # the last step
        self.num_drafts = 0  # runs with draft tokens
        self.num_draft_tokens = 0
        self.num_accepted = 0  # draft tokens
        self.accepted_at: Counter[int] = Counter()  # accepted draft tokens by position in their draft

    # ---- plan

    def add_drafts(self, plan: StepPlan, behind: list[Sequence], has_prompts: bool) -> int:
        """Extend runs of one token by drafts; returns how many tokens. `behind` are sequences with reserved blocks.
        `has_prompts`: the step is to have room for some."""
        runs = [(run, seq) for run in plan.runs if (seq := self._rows[run.row]).proposals and not seq.num_placeholders]
        if not runs:
            return 0
        best = [self._best(seq) for _, seq in runs]
        offers = [self._offer(seq, proposal) for (_, seq), proposal in zip(runs, best, strict=True)]
        self.budget.step_cost.look_at(len(plan.runs))
        counts = self._counts(offers, self._max_drafts(len(plan.runs), has_prompts), len(plan.runs))
        reserved = sum(self._kv_blocks.num_reserved_blocks(seq) for seq in behind if seq.running)
        num_spare = self._kv_blocks.pool.num_available - reserved  # blocks
        num_drafts = 0
        for (run, seq), proposal, (tree, _), count in zip(runs, best, offers, counts, strict=True):
            if count >= num_spare and self._kv_blocks.num_new_blocks(seq, seq.num_computed + count) > num_spare:
                count = min(count, len(seq.block_table) * self._limits.block_size - seq.num_computed)
            if self._kv_blocks.states:
                count = min(count, self._kv_blocks.states.num_spare)
            if count > 0:
                if seq.proposals[0] is not proposal:
                    seq.proposals = [proposal, *(other for other in seq.proposals if other is not proposal)]
                num_spare -= self._extend(run, seq, tree, count, plan)
                num_drafts += count
        return num_drafts

    def set_quotas(self, plan: StepPlan, num_coming: int, num_seqs: int) -> None:
        """Say how many draft tokens are to be proposed after each run, by methods that are not free, and after which
        runs those that are free propose some. `num_coming`: of sequences whose prompts are computed in this step or the
        next ones; `num_seqs`: all that decode or come"""
        most = self._max_drafts(len(plan.runs), num_coming > 0)
        self.budget.step_cost.look_at(len(plan.runs))
        if self._free and self._may_rest:
            for run in plan.runs:
                seq = self._rows[run.row]
                if run.drafts:
                    seq.num_idle = 0
                elif seq.proposals or seq.num_idle > MAX_IDLE:
                    seq.num_idle += 1
                run.asks_free = seq.num_idle <= MAX_IDLE or seq.num_idle % IDLE_INTERVAL == 0
        for quotas in self._quotas:
            if quotas.should_rest(len(plan.runs), bool(plan.admitted)):
                continue
            asked = [one for run in plan.runs if (one := self._asked(run, plan.step, quotas)) is not None]
            if quotas.method.reads_along and plan.admitted:
                asked = self._without_unread(asked, plan, quotas, num_seqs)
            quotas.assign(plan.step, asked, most, num_coming)
            if self._free:
                for one in asked:
                    if count := one.run.quotas.get(quotas.method.name, 0):
                        net_gain = quotas.net_gain(one.rate, count, len(asked))
                        one.run.num_enough = self._num_enough(one.seq, net_gain)

    def _asked(self, run: Run, step: int, quotas: DraftQuotas) -> Asked | None:
        """None: no draft token fits behind the run, or none came when they were asked for."""
        seq, method = self._rows[run.row], quotas.method
        fits = min(method.max_tokens, seq.group.length - seq.num_known - 2, self._max_chunk - 1)
        if seq.group.search is not None or fits <= 0:
            return None
        rate = self._rate(seq, method.name)
        if seq.admitted_step == step:
            rate.num_read = run.start  # what is in the cache was read when it was computed
            rate.forget_answers()
        if seq.num_known < rate.ask_at:
            return None
        fits_tree = fits == method.max_tokens and 0 < method.tree_nodes < self._places(seq)
        return Asked(run, seq, rate, fits, fits_tree)

    def _without_unread(self, asked: list[Asked], plan: StepPlan, quotas: DraftQuotas, num_seqs: int) -> list[Asked]:
        """Decide which of the sequences that come are read."""
        unread = set()
        for admission in plan.admitted:
            if not quotas.should_read(num_seqs):
                admission.reads_along = False
                seq = self._rows[admission.row]
                self._rate(seq, quotas.method.name).ask_at = seq.group.length + 1
                unread.add(admission.row)
        return [one for one in asked if one.run.row not in unread]

    def should_wait(self, run: Run, seq: Sequence) -> bool:
        """Whether the next step leaves `seq` out, so that the step after it verifies drafts."""
        if run.drafts or run.quotas:
            return True
        return bool(seq.proposals) and self.budget.should_wait(self._accepted(seq, self._best(seq)))

    def should_gather(self, ready: list[Sequence], plan: StepPlan, owners: list[Sequence | None]) -> bool:
        """Whether these sequences wait for those of the plan in flight, so that one step computes all: where that gives
        more tokens per second than two groups in turn. Those with drafts would be apart for good; a sequence without
        is computed in the steps of both groups meanwhile. `owners`: by row, when the plan was made."""
        in_flight = [(run, owners[run.row]) for run in plan.runs if run.drafts or run.quotas]
        awaited = [(run, seq) for run, seq in in_flight if seq is not None and seq.row == run.row]  # still running
        if not awaited or not all(len(seq.tokens) == seq.num_computed + 1 for seq in ready):
            return False
        best = [self._best(seq) if seq.proposals else None for seq in ready]
        num_ready = sum(1 + len(one.tokens) if one else 1 for one in best)
        yielded = sum(1.0 + self._accepted(seq, one) for seq, one in zip(ready, best, strict=True) if one)
        yielded += sum(self._expected(run, seq) for run, seq in awaited)
        num_plain = best.count(None)
        num_awaited, seconds = sum(run.count for run, _ in awaited), self.budget.step_cost.seconds
        apart = seconds(plan.num_tokens) + seconds(num_ready)
        together = COST_MARGIN * seconds(num_awaited + num_ready)
        return (yielded + num_plain) * apart > (yielded + 2 * num_plain) * together

    def _expected(self, run: Run, seq: Sequence) -> float:
        """Tokens of a run that verifies drafts, or of the next one if it has been asked for some."""
        if not run.quotas:
            return 1.0 + (self._accepted(seq, self._best(seq)) if seq.proposals else 0.0)
        return 1.0 + max(self._rate(seq, method).accepted_tokens(count) for method, count in run.quotas.items())

    def _counts(self, offers: list[tuple[DraftTree, list[float]]], most: int, num_runs: int) -> list[int]:
        fixed = self.policy.fixed_length(num_runs)
        if fixed is None:
            return self.budget.choose([probabilities for _, probabilities in offers], num_runs, most)
        return [min(fixed, most // len(offers), len(tree.tokens)) for tree, _ in offers]

    def _max_drafts(self, num_runs: int, has_prompts: bool) -> int:
        """Of one step. The other half is for prompts, unless drafts have room of their own and no prompt comes."""
        most = self._limits.max_num_batched_tokens - num_runs
        room = self._limits.max_draft_tokens
        return most + room if room and not has_prompts else most // 2

    def _best(self, seq: Sequence) -> Proposal:
        """The proposal of which the most tokens are expected to be accepted."""
        if len(seq.proposals) == 1:
            return seq.proposals[0]
        return max(seq.proposals, key=lambda one: self._accepted(seq, one))

    def _accepted(self, seq: Sequence, proposal: Proposal) -> float:
        """Draft tokens that are expected to be accepted."""
        rate = self._rate(seq, proposal.method)
        if proposal.confidences:
            return sum(rate.probabilities(proposal.parents, proposal.confidences))
        if is_unknown(proposal.parents):
            return sum(rate.probabilities_of_unknown(len(proposal.tokens)))
        return rate.accepted_tokens(len(proposal.tokens))

    def _offer(self, seq: Sequence, proposal: Proposal) -> tuple[DraftTree, list[float]]:
        """The draft tokens that fit, the likeliest first, and how likely each is, as far as they may pay."""
        rate = self._rate(seq, proposal.method)
        longest = max(min(seq.group.length - seq.num_known, self._max_chunk) - 1, 0)
        if is_unknown(proposal.parents):
            # Of a tree that may be too deep, so many nodes fit in any case.
            fits = self._places(seq) if longest >= self._depths[proposal.method] else min(longest, self._places(seq))
            tree = DraftTree(proposal.tokens[:fits], proposal.parents[:fits])
            return tree, rate.probabilities_of_unknown(len(tree.tokens))
        if not proposal.confidences:
            tokens = proposal.tokens[:longest]
            return DraftTree(tokens), chain_probabilities(rate.position_rates(len(tokens)))
        tree = DraftTree(proposal.tokens, proposal.parents, proposal.confidences)
        probabilities = rate.probabilities(tree.parents, tree.confidences)
        nodes: list[int] | range = range(len(tree.tokens))
        if longest < len(nodes):
            nodes = [node for node, depth in enumerate(tree.depths()) if depth <= longest]
        nodes = sorted(nodes, key=lambda node: -probabilities[node])[: self._places(seq)]  # parents come first
        return tree.keep(nodes), [probabilities[node] for node in nodes]

    def _places(self, seq: Sequence) -> int:
        """Where nodes of a tree can be computed: several may stand at one position."""
        room = min(self._limits.max_model_len - seq.num_known, self._max_chunk) - 1
        return max(min(room, MAX_TREE_NODES), 0)

    def _rate(self, seq: Sequence, method: str) -> AcceptanceRate:
        rate = seq.rates.get(method)
        if rate is None:
            rate = seq.rates[method] = AcceptanceRate(self._methods[method])
        return rate

    def _num_enough(self, seq: Sequence, net_gain: float) -> int:
        """Free draft tokens of `seq` that are worth more than `net_gain` tokens; 0: no number of them is."""
        rates = [(self._rate(seq, method.name), method.max_tokens) for method in self._free]
        rate, most = max(rates, key=lambda one: one[0].rate)
        return next((count for count in range(1, most + 1) if rate.accepted_tokens(count) > net_gain), 0)

    def _extend(self, run: Run, seq: Sequence, tree: DraftTree, count: int, plan: StepPlan) -> int:
        """Add `count` draft tokens to a run; returns how many blocks they take."""
        run.drafts = tree.tokens[:count]
        if tree.parents:
            run.parents = without_chain(tree.parents[:count])
        run.count += count
        seq.add_placeholders(count)
        end = seq.num_computed + count
        num_blocks = self._kv_blocks.num_new_blocks(seq, end)
        if num_blocks or self._kv_blocks.pages:
            self._kv_blocks.allocate(seq, end, plan)
            run.new_blocks += seq.take_unsent_blocks()
        seq.num_computed = end
        if self._kv_blocks.states:
            self._kv_blocks.states.plan_drafts(seq, run, count)
        return num_blocks

    # ---- update

    def verify(self, seq: Sequence, sampled: SampledRow, run: Run | None, step: int) -> None:
        """Roll back the rejected drafts of `run`, and update acceptance rates, also by drafts that did not run."""
        if run is not None and sampled.tree is not None:
            self._fill_in(seq, run, sampled.tree)
        if run is not None:
            seq.drop_placeholders(len(run.drafts))
            self._kv_blocks.roll_back(seq, run.start + self._num_kept(seq, sampled, run))
            self._count(len(run.drafts), len(sampled.tokens) - 1)
        if not sampled.tokens:
            return
        if seq.proposals:
            self._unlearnt.append((seq, seq.proposals, run, sampled.tokens[:]))
        seq.proposals = sampled.proposals
        for rate in seq.rates.values():
            if rate.asked_step == step:
                rate.note_answer(bool(sampled.proposals), seq.num_known)

    @staticmethod
    def _fill_in(seq: Sequence, run: Run, tree: DraftTree) -> None:
        """What only the device knew when the run was planned."""
        run.drafts, run.parents = tree.tokens[: len(run.drafts)], tree.parents[: len(run.parents)]
        if seq.proposals and is_unknown(seq.proposals[0].parents):
            method = seq.proposals[0].method
            seq.proposals[0] = Proposal(method, tree.tokens, tree.parents, tree.confidences)

    def _learn_all(self) -> None:
        """Compare what was proposed with what was sampled. Not in `verify`: a device may wait for the next plan."""
        for seq, proposals, run, tokens in self._unlearnt:
            for number, proposal in enumerate(proposals):
                verified = run if number == 0 else None
                if verified or not self.policy.synthetic:
                    self._learn(seq, proposal, verified, tokens)
        self._unlearnt.clear()
        if (output := self._drafted) is not None:
            for quotas in self._quotas:
                steps = output.draft_steps.get(quotas.method.name, ()) if output.is_timed else ()
                quotas.record_drafting(output.step, output.draft_seconds, steps)
            self._drafted = None

    def _learn(self, seq: Sequence, proposal: Proposal, run: Run | None, tokens: list[int]) -> None:
        """Compare a proposal with what was sampled. `run`: the one that verified some of it."""
        rate = self._rate(seq, proposal.method)
        if proposal.confidences:
            rate.update_tree(proposal.tokens, proposal.parents, proposal.confidences, tokens)
            if run and proposal.parents:
                self._methods[proposal.method].add_tree(run.drafts, run.parents, tokens)
        elif run or UNKNOWN not in proposal.tokens:
            rate.update(run.drafts if run else proposal.tokens, tokens)

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
        for position in range(num_accepted):
            self.accepted_at[position] += 1

    # ---- measure

    def record_drafting(self, output: StepOutput) -> None:
        """What methods took to propose."""
        self._learn_all()  # where no times are recorded
        self._drafted, self._draft_seconds, self._is_timed = output, output.draft_seconds, output.is_timed
        self._device_seconds = output.device_seconds if self._ahead else 0.0

    def record_step(self, plan: StepPlan, seconds: float, gap: float, has_prompts: bool) -> None:
        """Learn from how long the step took whose output came last, and from what it verified. `gap`: as given to
        `Scheduler.record_step`"""
        self._learn_all()
        for quotas in self._quotas:
            quotas.record_step(seconds)
        if has_prompts or not plan.runs or not self._is_timed:
            self.budget.step_cost.forget_last()
        else:
            own = self._device_seconds or max(seconds - self._draft_seconds, 0.01 * seconds)
            self.budget.step_cost.record_step(plan.num_tokens, own, len(plan.runs))
            if gap and self._device_seconds:
                self.budget.record_wait(len(plan.runs), gap + seconds - own - self._draft_seconds)

    def record_output(self, num_tokens: int) -> None:
        """An answer has ended."""
        for quotas in self._quotas:
            quotas.record_output(num_tokens)

    def stats(self) -> dict[str, Any]:
        """The fields of `SchedulerStats` about drafts."""
        return {
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_tokens": self.num_accepted,
            "accepted_at": [self.accepted_at[position] for position in range(len(self.accepted_at))],
        }
