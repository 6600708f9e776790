"""How many draft tokens pay.

An accepted draft token saves a step. Every draft token makes the step that verifies it longer, and may take time to
propose. Both are estimated: how likely a draft is accepted, from the drafts of its sequence and of its method so far
(`acceptance.py`), and what it costs, from the steps so far (`step_cost.py`). The likeliest draft tokens of all
sequences are taken, as many as give the most tokens per second."""

from collections.abc import Sequence
from itertools import islice

from quire.core.acceptance import expected_tokens
from quire.core.step_cost import StepCostModel

COST_MARGIN = 1.1  # by which costs are raised: they and gains are estimates
MIN_RATE = 0.05  # drafts that are less likely are left alone


class DraftBudget:
    """Chooses how many draft tokens of each sequence are proposed, or verified in a step."""

    def __init__(self, token_cost: float, ahead: int = 0) -> None:
        """`ahead`: the depth of async scheduling, 0 without."""
        self.step_cost = StepCostModel(token_cost)
        self._ahead = ahead

    def choose(
        self, offers: Sequence[tuple[float, int]], num_tokens: int, max_drafts: int, draft_seconds: float = 0.0
    ) -> list[int]:
        """How many draft tokens of each offer (acceptance rate, draft tokens) to add to a step of `num_tokens`, if each
        takes `draft_seconds` to propose."""
        counts = [0] * len(offers)
        seconds, expected = self.step_cost.seconds(num_tokens), float(num_tokens)
        if not self._may_pay(offers, num_tokens, draft_seconds):
            return counts
        ranked = sorted(  # the likeliest first; position p of a draft is accepted with probability rate ** p
            (-(rate**position), position, index)
            for index, (rate, num_drafts) in enumerate(offers)
            if rate >= MIN_RATE
            for position in range(1, num_drafts + 1)
        )[:max_drafts]
        best, num_chosen = expected / seconds, 0
        added = self.step_cost.added_seconds(num_tokens)
        for number, (negative_probability, _, _) in enumerate(ranked, 1):
            expected -= negative_probability
            seconds += COST_MARGIN * (next(added) + draft_seconds)
            if expected / seconds > best:
                best, num_chosen = expected / seconds, number
        for _, _, index in islice(ranked, num_chosen):
            counts[index] += 1
        return counts

    def _may_pay(self, offers: Sequence[tuple[float, int]], num_tokens: int, draft_seconds: float) -> bool:
        """False if even the likeliest draft token, wherever tokens are cheapest, costs more than it gains."""
        rate = max((rate for rate, _ in offers), default=0.0)
        last = num_tokens + sum(num_drafts for _, num_drafts in offers)
        cost = COST_MARGIN * (self.step_cost.min_slope(num_tokens, last) + draft_seconds)
        return rate >= MIN_RATE and rate * self.step_cost.seconds(num_tokens) > cost * num_tokens

    def saved_seconds(self, rate: float, count: int, num_tokens: int, draft_seconds: float) -> float:
        """What each token of a sequence saves if `count` drafts are added to all its steps, of `num_tokens`
        otherwise."""
        accepted = expected_tokens(rate, count) - 1.0
        cost = sum(islice(self.step_cost.added_seconds(num_tokens), count)) + count * draft_seconds
        worth = accepted * self.step_cost.seconds(num_tokens) / num_tokens
        return (worth - COST_MARGIN * cost) / (1.0 + accepted)

    def should_wait(self, rate: float, count: int) -> bool:
        """Whether a sequence gains more from verifying `count` drafts in its next step than from the `ahead` steps that
        it misses while it waits for its token."""
        return count > 0 and expected_tokens(rate, count) > 1 + self._ahead
