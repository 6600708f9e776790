"""All speculative methods of an engine, as the runner sees them."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire.core.draft_tree import DraftTree
from quire.core.plan import Admission, Proposal, Run, SampledRow, StepPlan
from quire.ops.kv_spec import KVCache
from quire.ops.opset import Int32, Program, Sampler, StepBatch, Value
from quire.runtime.spec.proposer import Proposer, Verified
from quire.runtime.spec.synthetic import SyntheticAcceptance

if TYPE_CHECKING:
    from quire.runtime.batch import BatchRows


class Proposers:
    """Asks the methods that are free for every row, and then the others for the rows whose run has a quota."""

    def __init__(
        self,
        methods: Sequence[tuple[str, Proposer]],
        free: Mapping[str, int],
        synthetic_rates: Sequence[float] = (),
        max_drafts: int = 0,
    ) -> None:
        """`free`: draft tokens of the methods that are asked for every row. `max_drafts`: of a run; 0: not known"""
        self._methods = sorted(methods, key=lambda method: method[0] not in free)
        self._free = free
        self.synthetic = SyntheticAcceptance(synthetic_rates) if synthetic_rates else None
        self.caches: list[KVCache] = [cache for _, proposer in methods for cache in proposer.caches]
        self.max_drafts = max_drafts
        self.tree_nodes = max((proposer.tree_nodes for _, proposer in methods), default=0)
        self._seconds = 0.0  # since `take_times`

    def tapped(self, forward: Callable[[Any, Any], Value]) -> Callable[[Any, Any], Value]:
        for _, proposer in self._methods:
            forward = proposer.tapped(forward)
        return forward

    def bind(self, rows: "BatchRows", target: Program, sampler: Sampler) -> None:
        for _, proposer in self._methods:
            proposer.bind(rows, target, sampler)

    def admit(self, admission: Admission) -> None:
        for _, proposer in self._methods:
            proposer.admit(admission)

    def read_rest(self, rows: Sequence[int]) -> None:
        for _, proposer in self._methods:
            proposer.read_rest(rows)

    def retire(self, row: int) -> None:
        for _, proposer in self._methods:
            proposer.retire(row)

    def move_blocks(self, plan: StepPlan) -> None:
        for _, proposer in self._methods:
            proposer.move_blocks(plan)

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        begin = time.perf_counter()
        for _, proposer in self._methods:
            proposer.follow(runs, batch)
        self._seconds += time.perf_counter() - begin

    def propose_ahead(self, known: Mapping[int, int], drafts: Mapping[int, list[int]], runs: Mapping[int, Run]) -> None:
        """Queue drafts behind a step whose outcome is not known yet. By row, in the order of its lines, how many tokens
        are known, and the drafts that are verified. Of several methods, the outcome decides which is asked. The time
        of this process is none of the step's: the device verifies meanwhile."""
        if len(self._methods) > 1:
            return
        ((name, proposer),) = self._methods
        counts = {row: self._free.get(name, runs[row].quotas.get(name, 0)) for row in known}
        verified, line = {}, 0
        for row, num_known in known.items():
            num_drafts = len(drafts.get(row, ()))
            if counts[row]:
                accepted = self.synthetic.draw(row, num_drafts) if self.synthetic and num_drafts else 0
                length = num_known + accepted + 1 if self.synthetic else -1
                verified[row] = Verified(num_known, line, num_drafts + 1, length)
            line += num_drafts + 1
        if verified:
            proposer.propose_ahead(verified, counts)

    def propose(self, known: Mapping[int, Int32], runs: Mapping[int, Run]) -> dict[int, list[Proposal]]:
        """By row, all its tokens and the run that sampled the last. -> proposals of the rows that have some"""
        begin = time.perf_counter()
        proposals: dict[int, list[Proposal]] = {}
        for name, proposer in self._methods:
            counts: dict[int, int] = {}
            if name in self._free:
                counts = dict.fromkeys((row for row in known if runs[row].asks_free), self._free[name])
            else:
                for row in known:
                    run = runs[row]
                    count = run.quotas.get(name, 0)
                    if count and not (run.num_enough and _has_enough(run, proposals.get(row, ()))):
                        counts[row] = count
            if not counts:
                continue
            wanted = known if len(counts) == len(known) else {row: known[row] for row in counts}
            drafted = proposer.propose(wanted, counts)
            if self.synthetic and name in self._free:
                trees = {row: one if isinstance(one, DraftTree) else DraftTree(one) for row, one in drafted.items()}
                chains = {row: tree.first_branch().tokens for row, tree in trees.items()}
                drafted = self.synthetic.pad(chains, wanted, counts)
            for row, one in drafted.items():
                tree = (one.tokens, one.parents, one.confidences) if isinstance(one, DraftTree) else (one,)
                proposals.setdefault(row, []).append(Proposal(name, *tree))
        self._seconds += time.perf_counter() - begin
        return proposals

    def read_drafts(self, row: int, proposal: Proposal) -> None:
        """Replace draft tokens that are UNKNOWN."""
        if proposal.parents:
            tree = self.grown_trees([row])[row]().keep(range(len(proposal.tokens)))
            proposal.tokens, proposal.parents, proposal.confidences = tree.tokens, tree.parents, tree.confidences
            return
        proposal.tokens = dict(self._methods)[proposal.method].read_drafts(row, len(proposal.tokens))

    def grown_trees(self, rows: Sequence[int]) -> dict[int, Callable[[], DraftTree]]:
        """The trees of these rows, which only the device knows."""
        return {row: tree for row in rows for _, proposer in self._methods if (tree := proposer.grown_tree(row))}

    def take_tree(self, row: int, tree: DraftTree) -> None:
        for _, proposer in self._methods:
            proposer.take_tree(row, tree)

    def accept(self, sampled: dict[int, SampledRow], drafts: Mapping[int, list[int]]) -> None:
        """Replace what these rows' verification sampled, with synthetic acceptance."""
        assert self.synthetic is not None
        for row, of_row in drafts.items():
            self.synthetic.accept(sampled[row], of_row)

    def take_times(self) -> tuple[float, dict[str, list[tuple[int, float]]], bool]:
        """-> the seconds since the last call, steps of methods' own in them, (tokens, seconds) by method, and whether
        that is all"""
        steps = {name: taken for name, proposer in self._methods if (taken := proposer.take_steps())}
        queued = sum(proposer.take_queued_seconds() for _, proposer in self._methods)
        seconds, self._seconds = self._seconds + queued, 0.0
        untimed = [proposer.take_untimed() for _, proposer in self._methods]
        return seconds, steps, not any(untimed)


def _has_enough(run: Run, proposals: Sequence[Proposal]) -> bool:
    """Whether free draft tokens are worth more than those of a quota."""
    return 0 < run.num_enough <= max(map(_longest, proposals), default=0)


def _longest(proposal: Proposal) -> int:
    """Draft tokens that may be accepted together."""
    return max(DraftTree(proposal.tokens, proposal.parents).depths(), default=0)
