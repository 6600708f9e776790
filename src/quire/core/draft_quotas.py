"""How many draft tokens the methods that are not free propose: a draft model takes time for every one of them.

Where a method pays, it is asked: for a chain, or for a tree where that gives more tokens per second. Where it does not,
it is tried now and then, on one sequence, from an allowance: a hundredth of the time of all steps."""

from collections.abc import Sequence as Many
from itertools import accumulate, islice
from typing import NamedTuple

from quire.core.acceptance import AcceptanceRate, MethodAcceptance, expected_tokens
from quire.core.draft_budget import COST_MARGIN, DraftBudget, chain_probabilities
from quire.core.draft_policy import IDLE_INTERVAL, MAX_IDLE, DraftMethod, DraftPolicy
from quire.core.plan import Run
from quire.core.sequence import Sequence
from quire.core.step_cost import StepCostModel

PROBE_SHARE = 0.01  # of the time of steps
MAX_PROBE_STEPS = 50.0  # the allowance is at most the time of so many steps of one token
NEW_METHOD = 8  # draft tokens before more than one is asked for: until then the acceptance rate is a belief
FEW_TRIALS = 4.0  # a sequence with fewer draft tokens is tried first
PAYING_WEIGHT = 1 / 64  # of one step in the share of sequences whose drafts pay
LEAST_PAYING = 0.02  # with a smaller share, a head reads few of the sequences that come
READ_ANYWAY = 16  # one of so many
SHORT_READ = 16  # tokens that a method may have to read before it drafts, without asking whether they pay


class Asked(NamedTuple):
    """A run after which drafts may be proposed."""

    run: Run
    seq: Sequence
    rate: AcceptanceRate
    fits: int  # draft tokens of a chain
    fits_tree: bool = False


class DraftQuotas:
    """Of one method."""

    def __init__(
        self, method: DraftMethod, acceptance: MethodAcceptance, policy: DraftPolicy, budget: DraftBudget
    ) -> None:
        self.method = method
        self._acceptance = acceptance
        self._policy = policy
        self._budget = budget
        self._draft_cost = StepCostModel(policy.token_cost)  # of the method's own steps
        self._allowance = 0.0  # seconds
        self._probed_step = -1
        self._mean_output = 0.0  # tokens of an answer; 0: none has ended
        self._num_rows = 0  # of the last step
        self._num_idle = 0  # steps in a row in which nothing paid
        # By the bits of the number of sequences in a step: the share of those for which drafts pay.
        self._paying: dict[int, float] = {}
        self._num_left_out = 0  # since a sequence was read

    def record_step(self, seconds: float) -> None:
        """A step has ended, which took so long."""
        self._allowance = min(self._allowance + PROBE_SHARE * seconds, self._max_allowance)

    @property
    def _max_allowance(self) -> float:
        return MAX_PROBE_STEPS * self._budget.step_cost.seconds(1)

    def record_drafting(self, step: int, seconds_in_all: float, steps: Many[tuple[int, float]]) -> None:
        """What drafts took, and steps of the method's own in it, (tokens, seconds)."""
        for num_tokens, seconds in steps:
            self._draft_cost.record_step(num_tokens, seconds)
        self._draft_cost.forget_last()
        if steps:
            self._budget.record_overhead(max(seconds_in_all - sum(seconds for _, seconds in steps), 0.0))
        if step == self._probed_step:
            self._allowance -= seconds_in_all
            self._probed_step = -1

    def record_output(self, num_tokens: int) -> None:
        """An answer has ended."""
        self._mean_output += (num_tokens - self._mean_output) * (0.1 if self._mean_output else 1.0)

    def should_rest(self, num_rows: int, has_new: bool) -> bool:
        """Whether nothing is asked for in this step: nothing has paid for some time, and the sequences are the same."""
        if has_new or num_rows != self._num_rows:
            self._num_idle = 0
        self._num_rows = num_rows
        if self._num_idle <= MAX_IDLE or self._policy.per_batch_size:
            return False
        self._num_idle += 1
        should_rest = self._num_idle % IDLE_INTERVAL != 0
        if should_rest:
            self._note_paying(0.0, num_rows)
        return should_rest

    def assign(self, step: int, asked: Many[Asked], max_drafts: int, num_coming: int) -> None:
        """Set the quota of each run. `num_coming`: of sequences whose prompts come, which do not wait for drafts."""
        if not asked:
            return
        fixed = self._policy.fixed_length(len(asked))
        if fixed is not None:
            counts = [self._fixed(one, fixed, max_drafts // len(asked)) for one in asked]
        else:
            counts = self._with_trees(asked, self._choose(asked, max_drafts, num_coming), max_drafts)
            self._num_idle = 0 if any(counts) else self._num_idle + 1
            self._note_paying(sum(map(bool, counts)) / len(asked), len(asked))
            if not any(counts) and self._probed_step < 0 and self._allowance >= self._seconds(1):
                self._probe(step, asked, counts)
        for one, count in zip(asked, counts, strict=True):
            if count:
                one.run.quotas[self.method.name] = count
                one.rate.num_read, one.rate.asked_step = one.seq.num_known, step

    def _note_paying(self, share: float, num_rows: int) -> None:
        before = self._paying.get(num_rows.bit_length(), 1.0)
        self._paying[num_rows.bit_length()] = before + PAYING_WEIGHT * (share - before)

    def should_read(self, num_rows: int) -> bool:
        """Whether a head reads a sequence that comes, from its start on. With so many sequences drafts may hardly ever
        pay; what it took to read is then lost."""
        self._num_left_out += 1
        if self._paying.get(num_rows.bit_length(), 1.0) < LEAST_PAYING and self._num_left_out < READ_ANYWAY:
            return False
        self._num_left_out = 0
        return True

    def _fixed(self, asked: Asked, count: int, most: int) -> int:
        """What options demand, as far as the step has room for `most` draft tokens of each sequence."""
        if count > self.method.max_tokens and asked.fits_tree and self.method.tree_nodes <= most:
            return self.method.tree_nodes
        return min(count, most, asked.fits)

    def _choose(self, asked: Many[Asked], max_drafts: int, num_coming: int) -> list[int]:
        num_rows = len(asked)
        scale = 1.0 if self._draft_cost.is_measured else self.method.cost * self._budget.step_cost.seconds(1)
        added = islice(self._draft_cost.added_seconds(1), num_rows - 1)
        seconds = [scale * each for each in accumulate(added, initial=self._draft_cost.seconds(1))]
        most = 1 if self._is_new else self.method.max_tokens
        offers = [chain_probabilities(one.rate.position_rates(min(one.fits, most))) for one in asked]
        counts = self._budget.choose_asked(offers, num_rows, max_drafts, seconds, num_coming)
        together = not num_coming and 2 * sum(map(bool, counts)) >= num_rows
        worth = [
            not count or self._is_worth(one, count, num_rows, count * seconds[-1] / num_rows, together)
            for one, count in zip(asked, counts, strict=True)
        ]
        if all(worth):
            return counts
        offers = [offer if kept else [] for offer, kept in zip(offers, worth, strict=True)]
        return self._budget.choose_asked(offers, num_rows, max_drafts, seconds, num_coming)

    @property
    def _is_new(self) -> bool:
        return self._acceptance.num_trials < NEW_METHOD

    # ---- trees

    def _with_trees(self, asked: Many[Asked], counts: list[int], max_drafts: int) -> list[int]:
        """Trees in place of the chains of the likeliest sequences, as many as give the most tokens per second."""
        method, num_rows = self.method, len(asked)
        if not method.tree_nodes or self._is_new or self._policy.synthetic:
            return counts
        seconds = self._tree_seconds(1)
        rows = [
            index
            for index, one in enumerate(asked)
            if one.fits_tree and self._is_worth(one, method.tree_nodes, num_rows, seconds)
        ]
        rows.sort(key=lambda index: -asked[index].rate.level_rate)
        best, chosen = self._tokens_per_second(asked, counts), counts
        num_trees = 1
        while num_trees <= len(rows) and num_trees * method.tree_nodes <= max_drafts:
            trees = counts[:]
            for index in rows[:num_trees]:
                trees[index] = method.tree_nodes
            if (ratio := self._tokens_per_second(asked, trees)) > best:
                best, chosen = ratio, trees
            num_trees = min(2 * num_trees, len(rows)) if num_trees < len(rows) else num_trees + 1
        return chosen

    def _tokens_per_second(self, asked: Many[Asked], counts: Many[int]) -> float:
        """Of the step that verifies so many draft tokens, and of proposing them."""
        num_rows, most = len(asked), self.method.max_tokens
        accepted = sum(self._accepted(one.rate, count) for one, count in zip(asked, counts, strict=True) if count)
        num_drafts = sum(self._num_verified(count) for count in counts)
        num_trees = sum(count > most for count in counts)
        drafting = self._tree_seconds(num_trees)
        for position in range(1, most + 1):
            if num_chains := sum(position <= count <= most for count in counts):
                drafting += self._seconds(num_chains)
        step_cost = self._budget.step_cost
        alone = step_cost.seconds(num_rows)
        return (num_rows + accepted) / (
            alone + COST_MARGIN * (step_cost.seconds(num_rows + num_drafts) - alone + drafting)
        )

    def _accepted(self, rate: AcceptanceRate, count: int) -> float:
        """Draft tokens that are expected to be accepted of a quota."""
        if count > self.method.max_tokens:
            return expected_tokens(rate.level_rate, self.method.max_tokens) - 1.0
        return rate.accepted_tokens(count)

    def _num_verified(self, count: int) -> int:
        """Draft tokens of a quota that are verified: of a tree, those that were likely enough so far."""
        return round(self._acceptance.mean_nodes) if count > self.method.max_tokens else count

    def _tree_seconds(self, num_trees: int) -> float:
        """What it takes to propose them."""
        return sum(self._seconds(num_trees * num_tokens) for num_tokens in self.method.tree_steps) if num_trees else 0.0

    # ---- cost

    def net_gain(self, rate: AcceptanceRate, count: int, num_rows: int) -> float:
        """Tokens that a quota of one sequence is worth, less what it takes to propose them."""
        is_tree = count > self.method.max_tokens
        drafting = self._tree_seconds(num_rows) if is_tree else count * self._seconds(num_rows)
        return self._accepted(rate, count) - drafting / self._budget.step_cost.seconds(num_rows)

    def _seconds(self, num_tokens: int) -> float:
        """Of a step of the method's own: of one draft token for each of as many sequences."""
        seconds = self._draft_cost.seconds(num_tokens)
        if self._draft_cost.is_measured:
            return seconds
        return seconds * self.method.cost * self._budget.step_cost.seconds(1)

    def _is_worth(self, asked: Asked, count: int, num_rows: int, draft_seconds: float, together: bool = False) -> bool:
        """Whether a sequence gains from its drafts what it takes to read its text first, and to wait for its tokens:
        alone, or together with most others."""
        accepted, seq = self._accepted(asked.rate, count), asked.seq
        if not (self._is_new or together or self._budget.should_wait(accepted)):
            return False
        missing = seq.num_known - asked.rate.num_read
        if missing <= SHORT_READ:
            return True
        left = seq.group.length - seq.num_known
        if self._mean_output:
            left = min(left, max(int(self._mean_output) - (seq.num_known - seq.group.num_prompt), SHORT_READ))
        saved = self._budget.saved_seconds(accepted, self._num_verified(count), num_rows, draft_seconds)
        return self._seconds(missing) < left * saved

    def _probe(self, step: int, asked: Many[Asked], counts: list[int]) -> None:
        """Ask for one draft token of one sequence, if the allowance pays for what has to be read for it. Whether it is
        right is known from the token that is sampled: it need not be verified. Where a sequence misses a step for it,
        it is another one each time."""
        ahead = self._budget.ahead
        decoding = [
            (rate.num_trials >= FEW_TRIALS, ahead * rate.asked_step, seq.num_known - rate.num_read, index)
            for index, (run, seq, rate, fits, _) in enumerate(asked)
            if fits and run.start + run.count == len(seq.tokens)
        ]
        for *_, missing, index in sorted(decoding):
            if (seconds := self._seconds(max(missing, 1))) <= self._allowance:
                counts[index] = 1
                self._probed_step = step
                return
            if ahead and seconds <= self._max_allowance:
                return  # its turn comes when there is enough
