"""How many draft tokens a step verifies.

An accepted draft token saves a step, and every draft token makes its step longer. Two estimates are weighed: the
acceptance rate of a sequence, from its drafts so far (verified or not), and the cost of a token, from the steps so far.
The likeliest draft tokens of all sequences are taken, as long as each raises the expected tokens per second."""

from collections.abc import Sequence

INITIAL_ACCEPTANCE_RATE = 0.5  # of a sequence without drafts so far
ACCEPTANCE_EMA_WEIGHT = 0.2  # of one draft token in the moving average of a sequence's acceptance rate
STEP_COST_EMA_WEIGHT = 0.05  # of one step in the moving averages of the cost model
PRIOR_TOKEN_COST = 0.4  # of one more token, as a fraction of a step of one token, until steps have been measured
PRIOR_WEIGHT = 0.5  # of the prior in the regression; compare with the variance of tokens per step
MIN_GAIN_PER_COST = 1.1  # expected gain of a draft token over its cost; both are estimates
MAX_STEP_OUTLIER = 3.0  # a longer step, in multiples of its predicted time, counts as this: something delayed it


class AcceptanceRate:
    """The probability that the next draft token of a sequence is accepted."""

    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = INITIAL_ACCEPTANCE_RATE

    def update(self, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        """Compare `drafts` with the sampled `tokens`, up to the first rejected one: those behind it teach nothing."""
        for draft, token in zip(drafts, tokens, strict=False):
            self.rate += ((draft == token) - self.rate) * ACCEPTANCE_EMA_WEIGHT
            if draft != token:
                return

    def expected_tokens(self, count: int) -> float:
        """Tokens that a step with `count` draft tokens yields: the accepted ones and the one sampled after them."""
        return sum(self.rate**position for position in range(count + 1))


class StepCostModel:
    """The time of a step without prompts as a line, seconds = a + b * tokens, fitted to the latest steps."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # moving averages
        self._variance = self._covariance = 0.0
        self._known = False

    def record_step(self, num_tokens: int, seconds: float) -> None:
        if not self._known:
            self._tokens, self._seconds, self._known = float(num_tokens), seconds, True
            return
        seconds = min(seconds, MAX_STEP_OUTLIER * self.seconds(num_tokens))
        weight, dx, dy = STEP_COST_EMA_WEIGHT, num_tokens - self._tokens, seconds - self._seconds
        self._tokens += weight * dx
        self._seconds += weight * dy
        self._variance = (1 - weight) * (self._variance + weight * dx * dx)
        self._covariance = (1 - weight) * (self._covariance + weight * dx * dy)

    def seconds(self, num_tokens: int) -> float:
        """The predicted time of a step; in multiples of a step of one token until a step has been measured."""
        if not self._known:
            return 1.0 + PRIOR_TOKEN_COST * (num_tokens - 1)
        return self._seconds + self.seconds_per_token * (num_tokens - self._tokens)

    @property
    def seconds_per_token(self) -> float:
        """The slope of the line, between 0 and the mean time per token."""
        if not self._known:
            return PRIOR_TOKEN_COST
        prior = self._seconds * PRIOR_TOKEN_COST / (1.0 + PRIOR_TOKEN_COST * (self._tokens - 1.0))
        slope = (self._covariance + PRIOR_WEIGHT * prior) / (self._variance + PRIOR_WEIGHT)
        return min(max(slope, 0.0), self._seconds / self._tokens)


class DraftBudget:
    """Chooses how many draft tokens of each sequence join a step."""

    def __init__(self, ahead: int = 0) -> None:
        """`ahead`: the depth of async scheduling, 0 without."""
        self.step_cost = StepCostModel()
        self._ahead = ahead

    def choose(self, offers: Sequence[tuple[AcceptanceRate, int]], num_tokens: int, max_drafts: int) -> list[int]:
        """How many draft tokens of each offer (acceptance rate, draft tokens) to add to a step of `num_tokens`."""
        counts = [0] * len(offers)
        expected, seconds = float(num_tokens), self.step_cost.seconds(num_tokens)
        seconds_per_token = self.step_cost.seconds_per_token
        ranked = sorted(  # the likeliest first; position p of a draft is accepted with probability rate ** p
            (-(acceptance.rate**position), position, index)
            for index, (acceptance, num_drafts) in enumerate(offers)
            if acceptance.rate * seconds > expected * seconds_per_token * MIN_GAIN_PER_COST
            for position in range(1, num_drafts + 1)
        )
        for negative_probability, _, index in ranked[:max_drafts]:
            if -negative_probability * seconds <= expected * seconds_per_token * MIN_GAIN_PER_COST:
                break
            expected -= negative_probability
            seconds += seconds_per_token
            counts[index] += 1
        return counts

    def should_wait(self, acceptance: AcceptanceRate, drafts: Sequence[int]) -> bool:
        """Whether a sequence gains more from verifying drafts in its next step than from the `ahead` steps that it
        misses while it waits for its token."""
        return bool(drafts) and acceptance.expected_tokens(len(drafts)) > 1 + self._ahead
