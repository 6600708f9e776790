"""How many drafts are worth computing.

A draft is a guess at a token that comes next. One that is right saves a step, and every one makes a step longer. How
likely a sequence's next guess is right is known from its guesses so far, those that nobody computed among them; what a
token adds to a step, from the steps so far. Of all guesses the likeliest are taken, as long as tokens a second grow."""

from collections.abc import Sequence

INITIAL_ACCEPTANCE_RATE = 0.5  # how likely the first guess for a sequence is taken to be right
ACCEPTANCE_EMA_WEIGHT = 0.2  # what one guess counts for, and
STEP_COST_EMA_WEIGHT = 0.05  # what one step does
PRIOR_TOKEN_COST = 0.4  # until it is known: what a token adds to a step, in times of a step of one token
PRIOR_WEIGHT = 0.5  # how much the steps seen have to differ (variance of tokens) to be believed rather than SLOPE
MIN_GAIN_PER_COST = 1.1  # times of what it costs that a guess has to gain: both are estimates
MAX_STEP_OUTLIER = 3.0  # times of what a step was expected to take: something else held up one that took longer


class AcceptanceRate:
    """How likely the next guess for a sequence is right."""

    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = INITIAL_ACCEPTANCE_RATE

    def update(self, drafts: Sequence[int], tokens: Sequence[int]) -> None:
        """`tokens` came where `drafts` were guessed. Behind the first that is wrong nothing can be learned."""
        for draft, token in zip(drafts, tokens, strict=False):
            self.rate += ((draft == token) - self.rate) * ACCEPTANCE_EMA_WEIGHT
            if draft != token:
                return

    def expected_tokens(self, count: int) -> float:
        """Tokens that are drawn if that many guesses are computed, the one behind the right guesses included."""
        return sum(self.rate**place for place in range(count + 1))


class StepCostModel:
    """What steps without prompts take, as a line: one number for a step, and one for each of its tokens."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0  # means, the last steps counting most
        self._variance = self._covariance = 0.0
        self._known = False

    def record_step(self, num_tokens: int, seconds: float) -> None:
        if not self._known:
            self._tokens, self._seconds, self._known = float(num_tokens), seconds, True
            return
        seconds = min(seconds, MAX_STEP_OUTLIER * self.seconds(num_tokens))
        away, late = num_tokens - self._tokens, seconds - self._seconds
        self._tokens += STEP_COST_EMA_WEIGHT * away
        self._seconds += STEP_COST_EMA_WEIGHT * late
        self._variance = (1 - STEP_COST_EMA_WEIGHT) * (self._variance + STEP_COST_EMA_WEIGHT * away * away)
        self._covariance = (1 - STEP_COST_EMA_WEIGHT) * (self._covariance + STEP_COST_EMA_WEIGHT * away * late)

    def seconds(self, num_tokens: int) -> float:
        """Seconds; in some unit of time, while no step is known."""
        if not self._known:
            return 1.0 + PRIOR_TOKEN_COST * (num_tokens - 1)
        return self._seconds + self.seconds_per_token * (num_tokens - self._tokens)

    @property
    def seconds_per_token(self) -> float:
        """What one token more adds: never less than nothing, and never more than its share."""
        if not self._known:
            return PRIOR_TOKEN_COST
        presumed = self._seconds * PRIOR_TOKEN_COST / (1.0 + PRIOR_TOKEN_COST * (self._tokens - 1.0))
        found = (self._covariance + PRIOR_WEIGHT * presumed) / (self._variance + PRIOR_WEIGHT)
        return min(max(found, 0.0), self._seconds / self._tokens)


class DraftBudget:
    """Chooses drafts, and counts what became of them."""

    def __init__(self, ahead: int = 0) -> None:
        """`ahead`: plans that go out before the output of this one comes."""
        self.step_cost = StepCostModel()
        self._ahead = ahead

    def choose(self, offers: Sequence[tuple[AcceptanceRate, int]], num_tokens: int, room: int) -> list[int]:
        """How many of each offer to add to a step of `num_tokens`, `room` in all at most: (trust, guesses) each."""
        counts = [0] * len(offers)
        gained, seconds, each = float(num_tokens), self.step_cost.seconds(num_tokens), self.step_cost.seconds_per_token
        ranked = sorted(
            (-(acceptance.rate**place), place, index)
            for index, (acceptance, most) in enumerate(offers)
            if acceptance.rate * seconds > gained * each * MIN_GAIN_PER_COST
            for place in range(1, most + 1)
        )
        for unlikely, _, index in ranked[:room]:
            if -unlikely * seconds <= gained * each * MIN_GAIN_PER_COST:
                break
            gained -= unlikely
            seconds += each
            counts[index] += 1
        return counts

    def should_wait(self, acceptance: AcceptanceRate, drafts: Sequence[int]) -> bool:
        """Whether it is better to know a sequence's token, and guess what follows, than to go on ahead of it: others
        have `ahead` steps meanwhile."""
        return bool(drafts) and acceptance.expected_tokens(len(drafts)) > 1 + self._ahead
