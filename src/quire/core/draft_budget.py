"""How many draft tokens pay.

An accepted draft token saves a step. Every draft token makes the step that verifies it longer, and may take time to
propose. Both are estimated: how likely a draft is accepted, from the drafts of its sequence and of its method so far
(`acceptance.py`), and what it costs, from the steps so far (`step_cost.py`). The likeliest draft tokens of all
sequences are taken, as many as give the most tokens per second."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import islice

from quire.core.step_cost import KNOTS, LEVEL_WEIGHT, MAX_STEP_OUTLIER, StepCostModel

COST_MARGIN = 1.1  # by which costs are raised: they and gains are estimates
HOST_SHARE, HOST_SHARE_OF_ROW = 0.05, 0.0006  # an H200, Llama-3.1-8B's shape: 1.9 of 9.2 ms for 256 sequences
WAIT_WEIGHT = 0.3  # of one step in what a device waits for the host; the first one counts for all
MAX_WAIT_SURPRISE = 1.0  # of a step, the most that one wait teaches: something else may have held the host up
MIN_RATE = 0.05  # drafts that are less likely are left alone


class DraftBudget:
    """Chooses how many draft tokens of each sequence are verified in a step, or proposed after it."""

    def __init__(self, token_cost: float, ahead: int = 0, measured: Sequence[tuple[int, float]] = ()) -> None:
        """`ahead`: the depth of async scheduling, 0 without. `measured`: sizes of steps, and their seconds."""
        self.step_cost = StepCostModel(token_cost, measured)
        self.ahead = ahead
        self._overhead = 0.0  # seconds of a step with drafts, beside those of the steps that draft and verify
        self._host_shares = [host_share(num_rows) for num_rows in KNOTS]  # linear between two
        self._waited = [0] * len(KNOTS)  # steps that these rest on

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
        self,
        offers: Sequence[Sequence[float]],
        num_tokens: int,
        max_drafts: int,
        draft_seconds: Sequence[float],
        num_coming: int = 0,
    ) -> list[int]:
        """The same, for drafts that have to be proposed first: [r] seconds for one more of each of r + 1 sequences. One
        position after the other, each for the likeliest of the sequences that have the position before. With async
        scheduling the next step waits for them, unless it has prompts, of `num_coming` sequences: then those with
        drafts miss that step, and a token that drafts save would be one of larger steps."""
        best_counts = [0] * len(offers)
        is_late = num_coming > 0 and self.ahead > 0
        if is_late:
            offers = [_less(offer, self.ahead) for offer in offers]
        if not self._may_pay(offers, num_tokens, draft_seconds[len(offers) - 1] / len(offers)):
            return best_counts
        max_drafts = min(max_drafts, sum(map(len, offers)))
        added = list(islice(self.step_cost.added_seconds(num_tokens), max_drafts))
        num_then = num_tokens + num_coming * is_late
        seconds, expected, num_drafts = self.step_cost.seconds(num_then), float(num_then), 0
        best, counts = expected / seconds, best_counts
        if not is_late:
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

    def record_wait(self, num_rows: int, seconds: float) -> None:
        """What a device had nothing to do, before a step that could only be planned when the last one had ended."""
        error = max(seconds, 0.0) / self.step_cost.seconds(num_rows) - self._host_share(num_rows)
        error = min(error, MAX_WAIT_SURPRISE)
        for knot, weight in _around(num_rows):
            self._host_shares[knot] += weight * error * max(WAIT_WEIGHT, 1 / (1 + self._waited[knot]))
            self._waited[knot] += weight > 0.5

    def _host_share(self, num_rows: int) -> float:
        return sum(weight * self._host_shares[knot] for knot, weight in _around(num_rows))

    def _wait(self, num_rows: int) -> float:
        """Seconds that a step with drafts of all these rows takes for the host: with async scheduling, what a device
        waits for it."""
        if not self.ahead:
            return self._overhead
        return self.ahead * self._host_share(num_rows) * self.step_cost.seconds(num_rows)

    def should_wait(self, accepted: float) -> bool:
        """Whether a sequence gains more from verifying drafts in its next step, of which so many are accepted, than
        from the `ahead` steps that it misses while it waits for its token. (If all wait, none misses a step.)"""
        return accepted > self.ahead


def host_share(num_rows: int) -> float:
    """Of a step without drafts, what a device waits for the host between two steps with drafts, where it has not been
    measured."""
    return min(HOST_SHARE + HOST_SHARE_OF_ROW * num_rows, 1.0)


def _around(num_rows: int) -> list[tuple[int, float]]:
    """The knots on both sides, and their weights."""
    left = min(bisect_right(KNOTS, num_rows) - 1, len(KNOTS) - 2)
    weight = min((num_rows - KNOTS[left]) / (KNOTS[left + 1] - KNOTS[left]), 1.0)
    return [(left, 1.0 - weight), (left + 1, weight)]


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


def _less(offer: Sequence[float], missed: int) -> list[float]:
    """What draft tokens are worth to a sequence that misses so many steps for them."""
    share = 1.0 - missed / max(sum(offer), missed)
    return [probability * share for probability in offer]


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
