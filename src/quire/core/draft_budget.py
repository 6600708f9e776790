"""How many draft tokens pay.

An accepted draft token saves a step. Every draft token makes the step that verifies it longer, and may take time to
propose. Both are estimated: how likely a draft is accepted, from the drafts of its sequence and of its method so far
(`acceptance.py`), and what it costs, from the steps so far (`step_cost.py`). The likeliest draft tokens of all
sequences are taken, as many as give the most tokens per second."""

from collections.abc import Sequence
from itertools import islice

from quire.core.step_cost import LEVEL_WEIGHT, MAX_STEP_OUTLIER, StepCostModel

COST_MARGIN = 1.1  # by which costs are raised: they and gains are estimates
HOST_SHARE, HOST_SHARE_OF_ROW = 0.05, 0.0006  # an H200, Llama-3.1-8B's shape: 1.9 of 9.2 ms for 256 sequences
MIN_RATE = 0.05  # drafts that are less likely are left alone


class DraftBudget:
    """Chooses how many draft tokens of each sequence are verified in a step, or proposed after it."""

    def __init__(self, token_cost: float, ahead: int = 0, measured: Sequence[tuple[int, float]] = ()) -> None:
        """`ahead`: the depth of async scheduling, 0 without. `measured`: sizes of steps, and their seconds."""
        self.step_cost = StepCostModel(token_cost, measured)
        self._ahead = ahead
        self._overhead = 0.0  # seconds of a step with drafts, beside those of the steps that draft and verify

    def choose(self, offers: Sequence[Sequence[float]], num_tokens: int, max_drafts: int) -> list[int]:
        """How many draft tokens of each offer to add to a step of `num_tokens`. An offer has the probability of each of
        its draft tokens, the greatest first."""
        seconds, expected = self.step_cost.seconds(num_tokens), float(num_tokens)
        probabilities = self._likely(offers, num_tokens)
        best, threshold, num_chosen = expected / seconds, 2.0, 0
        added = self.step_cost.added_seconds(num_tokens)
        for number, probability in enumerate(probabilities[:max_drafts], 1):  # the likeliest first
            expected += probability
            seconds += COST_MARGIN * next(added)
            if expected > best * seconds:
                best, threshold, num_chosen = expected / seconds, probability, number
        return _counts(offers, threshold, num_chosen)

    def _likely(self, offers: Sequence[Sequence[float]], num_tokens: int) -> list[float]:
        """The probabilities of all draft tokens that may pay, the greatest first."""
        last = num_tokens + sum(map(len, offers))
        cheapest = COST_MARGIN * self.step_cost.min_slope(num_tokens, last) * num_tokens
        least = max(cheapest / self.step_cost.seconds(num_tokens), MIN_RATE)
        return sorted((one for offer in offers for one in offer if one > least), reverse=True)

    def choose_asked(
        self, offers: Sequence[Sequence[float]], num_tokens: int, max_drafts: int, draft_seconds: Sequence[float]
    ) -> list[int]:
        """The same, for drafts that have to be proposed first: [r] seconds for one more of each of r + 1 sequences. One
        position after the other, each for the likeliest of the sequences that have the position before."""
        best_counts = [0] * len(offers)
        if not self._may_pay(offers, num_tokens, draft_seconds[len(offers) - 1] / len(offers)):
            return best_counts
        max_drafts = min(max_drafts, sum(map(len, offers)))
        added = list(islice(self.step_cost.added_seconds(num_tokens), max_drafts))
        seconds, expected, num_drafts = self.step_cost.seconds(num_tokens), float(num_tokens), 0
        best, counts = expected / seconds, best_counts
        seconds += self._wait(len(offers))
        rows = list(range(len(offers)))
        for position in range(max(map(len, offers))):
            rows = [index for index in rows if len(offers[index]) > position]
            rows.sort(key=lambda index: -offers[index][position])
            more, verifying, choice = expected, 0.0, (0.0, 0, expected, seconds)
            for number, index in enumerate(rows[: max_drafts - num_drafts]):
                more += offers[index][position]
                verifying += added[num_drafts + number]
                longer = seconds + COST_MARGIN * (verifying + draft_seconds[number])
                if more > choice[0] * longer:
                    choice = (more / longer, number + 1, more, longer)
            ratio, num_rows, expected, seconds = choice
            rows, num_drafts = rows[:num_rows], num_drafts + num_rows
            counts = counts[:]
            for index in rows:
                counts[index] += 1
            if ratio > best:
                best, best_counts = ratio, counts
        return best_counts

    def _may_pay(self, offers: Sequence[Sequence[float]], num_tokens: int, draft_seconds: float) -> bool:
        """False if even the likeliest draft token, wherever tokens are cheapest, costs more than it gains."""
        rate = max((offer[0] for offer in offers if offer), default=0.0)
        last = num_tokens + sum(map(len, offers))
        cost = COST_MARGIN * (self.step_cost.min_slope(num_tokens, last) + draft_seconds)
        return rate >= MIN_RATE and rate * self.step_cost.seconds(num_tokens) > cost * num_tokens

    def saved_seconds(self, accepted: float, num_drafts: int, num_tokens: int, draft_seconds: float) -> float:
        """What each token of a sequence saves if drafts, of which so many are accepted and which take `draft_seconds`
        to propose, are added to all its steps, of `num_tokens` otherwise."""
        cost = COST_MARGIN * (self.step_cost.share_of_drafts(num_tokens, num_drafts) + draft_seconds)
        worth = accepted * self.step_cost.seconds(num_tokens) / num_tokens
        return (worth - cost - self._wait(num_tokens) / num_tokens) / (1.0 + accepted)

    def record_overhead(self, seconds: float) -> None:
        """What the host did for the drafts of a step, beside drafting."""
        if self._overhead:
            seconds = min(seconds, MAX_STEP_OUTLIER * self._overhead)
        self._overhead += (seconds - self._overhead) * (LEVEL_WEIGHT if self._overhead else 1.0)

    def _wait(self, num_rows: int) -> float:
        """Seconds that a step with drafts of all these rows takes for the host: with async scheduling, what a device
        waits for it."""
        if not self._ahead:
            return self._overhead
        return self._ahead * host_share(num_rows) * self.step_cost.seconds(num_rows)

    def should_wait(self, accepted: float) -> bool:
        """Whether a sequence gains more from verifying drafts in its next step, of which so many are accepted, than
        from the `ahead` steps that it misses while it waits for its token. (If all wait, none misses a step.)"""
        return accepted > self._ahead


def host_share(num_rows: int) -> float:
    """Of a step without drafts, what a device waits for the host between two steps with drafts."""
    return min(HOST_SHARE + HOST_SHARE_OF_ROW * num_rows, 1.0)


def chain_probabilities(rates: Sequence[float]) -> list[float]:
    """Of the draft tokens of a chain, as far as they may pay, that all up to it are accepted: `rates` are those of each
    after the one before."""
    probabilities = []
    probability = 1.0
    for rate in rates:
        probability *= rate
        if probability <= MIN_RATE:
            break
        probabilities.append(probability)
    return probabilities


def _counts(offers: Sequence[Sequence[float]], threshold: float, num_chosen: int) -> list[int]:
    """Of each offer, the draft tokens whose probability is above `threshold`, and of those at it as many as make
    `num_chosen` in all."""
    if not num_chosen:
        return [0] * len(offers)
    counts = [sum(probability > threshold for probability in offer) for offer in offers]
    left = num_chosen - sum(counts)
    for index, offer in enumerate(offers):
        while left and counts[index] < len(offer) and offer[counts[index]] >= threshold:
            counts[index], left = counts[index] + 1, left - 1
    return counts
