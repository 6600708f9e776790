"""How many draft tokens the methods that are not free propose: a draft model takes time for every one of them.

Where a method pays, it is asked. Where it does not, it is tried now and then, on one sequence, from an allowance: a
hundredth of the time of all steps."""

from collections.abc import Sequence as Many
from itertools import accumulate, islice

from quire.core.acceptance import AcceptanceRate, MethodAcceptance, expected_tokens
from quire.core.draft_budget import DraftBudget
from quire.core.draft_policy import DraftMethod, DraftPolicy
from quire.core.plan import Run
from quire.core.sequence import Sequence
from quire.core.step_cost import StepCostModel

PROBE_SHARE = 0.01  # of the time of steps
MAX_PROBE_STEPS = 50.0  # the allowance is at most the time of so many steps of one token
NEW_METHOD = 8  # draft tokens before more than one is asked for: until then the acceptance rate is a belief
FEW_TRIALS = 4.0  # a sequence with fewer draft tokens is tried first
SHORT_READ = 16  # tokens that a method may have to read before it drafts, without asking whether they pay

Asked = tuple[Run, Sequence, AcceptanceRate, int]  # and the draft tokens that fit


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

    def record_step(self, seconds: float) -> None:
        """A step has ended, which took so long."""
        most = MAX_PROBE_STEPS * self._budget.step_cost.seconds(1)
        self._allowance = min(self._allowance + PROBE_SHARE * seconds, most)

    def record_drafting(self, step: int, seconds_in_all: float, steps: Many[tuple[int, float]]) -> None:
        """What drafts took, and steps of the method's own in it, (tokens, seconds)."""
        for num_tokens, seconds in steps:
            self._draft_cost.record_step(num_tokens, seconds)
        self._draft_cost.forget_last()
        if step == self._probed_step:
            self._allowance -= seconds_in_all
            self._probed_step = -1

    def record_output(self, num_tokens: int) -> None:
        """An answer has ended."""
        self._mean_output += (num_tokens - self._mean_output) * (0.1 if self._mean_output else 1.0)

    def assign(self, step: int, asked: Many[Asked], max_drafts: int) -> None:
        """Set the quota of each run."""
        if not asked:
            return
        fixed = self._policy.fixed_length(len(asked))
        if fixed is not None:
            counts = [min(fixed, fits) for *_, fits in asked]
        else:
            counts = self._choose(asked, max_drafts)
            if not any(counts) and self._probed_step < 0 and self._allowance > 0.0:
                self._probe(step, asked, counts)
        for (run, seq, rate, _), count in zip(asked, counts, strict=True):
            if count:
                run.quotas[self.method.name] = count
                rate.num_read = seq.num_known

    def _choose(self, asked: Many[Asked], max_drafts: int) -> list[int]:
        num_rows = len(asked)
        scale = 1.0 if self._draft_cost.is_measured else self.method.cost * self._budget.step_cost.seconds(1)
        added = islice(self._draft_cost.added_seconds(1), num_rows - 1)
        seconds = [scale * each for each in accumulate(added, initial=self._draft_cost.seconds(1))]
        most = 1 if self._acceptance.num_trials < NEW_METHOD else self.method.max_tokens
        offers = [(rate.rate, min(fits, most)) for _, _, rate, fits in asked]
        counts = self._budget.choose_asked(offers, num_rows, max_drafts, seconds)
        worth = [
            not count or self._is_worth(one, count, num_rows, seconds[-1] / num_rows)
            for one, count in zip(asked, counts, strict=True)
        ]
        if all(worth):
            return counts
        offers = [(rate, fits if kept else 0) for (rate, fits), kept in zip(offers, worth, strict=True)]
        return self._budget.choose_asked(offers, num_rows, max_drafts, seconds)

    def net_gain(self, rate: float, count: int, num_rows: int) -> float:
        """Tokens that `count` drafts of one sequence are worth, less what it takes to propose them."""
        step, drafts = self._budget.step_cost.seconds(num_rows), count * self._seconds(num_rows) / num_rows
        return expected_tokens(rate, count) - 1.0 - drafts * num_rows / step

    def _seconds(self, num_tokens: int) -> float:
        """Of a step of the method's own: of one draft token for each of as many sequences."""
        seconds = self._draft_cost.seconds(num_tokens)
        if self._draft_cost.is_measured:
            return seconds
        return seconds * self.method.cost * self._budget.step_cost.seconds(1)

    def _is_worth(self, asked: Asked, count: int, num_rows: int, draft_seconds: float) -> bool:
        """Whether a sequence gains from its drafts what it takes to read its text first, and to wait for its tokens."""
        _, seq, rate, _ = asked
        is_new = self._acceptance.num_trials < NEW_METHOD  # one draft token seldom gains more than a step
        if not is_new and not self._budget.should_wait(rate.rate, count):
            return False
        missing = seq.num_known - rate.num_read
        if missing <= SHORT_READ:
            return True
        left = seq.group.length - seq.num_known
        if self._mean_output:
            left = min(left, max(int(self._mean_output) - (seq.num_known - seq.group.num_prompt), SHORT_READ))
        return self._seconds(missing) < left * self._budget.saved_seconds(rate.rate, count, num_rows, draft_seconds)

    def _probe(self, step: int, asked: Many[Asked], counts: list[int]) -> None:
        """Ask for one draft token of one sequence, if the allowance pays for what has to be read for it. Whether it is
        right is known from the token that is sampled: it need not be verified."""
        decoding = [
            (rate.num_trials >= FEW_TRIALS, seq.num_known - rate.num_read, index)
            for index, (run, seq, rate, fits) in enumerate(asked)
            if fits and run.start + run.count == len(seq.tokens)
        ]
        for _, missing, index in sorted(decoding):
            if self._seconds(max(missing, 1)) <= self._allowance:
                counts[index] = 1
                self._probed_step = step
                return
