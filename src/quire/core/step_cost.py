"""The time of a step by its number of tokens, learnt from the steps that ran, or measured before."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # tokens; the time is linear between two
KNOT_WIDTHS = tuple(right - left for left, right in pairwise(KNOTS))
LEVEL_WEIGHT = 0.1  # of one step in the moving average of the level; the first steps are a plain average
MIN_SLOPE_WEIGHT = 0.1  # of one pair of steps in a slope, when many are known
KEPT_STEPS = 3  # that a level rests on which was learnt some time ago: contexts may be others now
OTHER_ROWS_WEIGHT = 0.3  # of a pair of steps with different sequences: their contexts differ, too
FORGETTING = 0.9997  # of a slope, in one step: what seemed too dear is tried again after some thousand steps
FORGETTING_INTERVAL = 8  # steps that slopes forget at once: it takes the host time
MAX_SURPRISE = 0.5  # of a predicted time, the most that one pair of steps teaches: one of them may have been delayed
MAX_STEP_OUTLIER = 3.0  # a longer step, in multiples of its predicted time, counts as this: something delayed it


class StepCostModel:
    """Seconds of a step of n tokens: those of a step of one token (the level), and what n - 1 more add (slopes).

    The level follows the latest steps: contexts grow, and something else may need the machine. Slopes are learnt from
    the difference of two steps in a row, which is free of both. Where steps are padded to some sizes, whose times were
    measured at the start with empty contexts, only the level is learnt, for each power of two of sequences: what their
    contexts take is in it."""

    def __init__(self, token_cost: float, measured: Sequence[tuple[int, float]] = ()) -> None:
        """`token_cost`: of one more token, as a fraction of a step of one token, until steps have been measured.
        `measured`: sizes that steps are padded to, ascending, and their seconds."""
        self._prior = token_cost
        self._sizes = [size for size, _ in measured]
        self._rises = [seconds - measured[0][1] for _, seconds in measured]  # beyond a step of the least size
        self._level = measured[0][1] if measured else 0.0  # 0: no step has been measured
        self._num_steps = 0  # that the level rests on: of sizes that were measured, contexts were short
        self._log_rows = -1  # of the sequences that the level is of
        self._levels: dict[int, tuple[float, int]] = {}  # of others: the level, and its steps
        self._slopes = [0.0] * len(KNOTS)  # seconds a token, from each knot on
        self._knot_rises = [0.0] * len(KNOTS)  # what all tokens up to a knot add
        self._num_remembered = 0  # steps since slopes were forgotten
        self._weights = [0.0] * len(KNOTS)  # pairs of steps that a slope rests on; 0: it is that of a neighbour
        self._last: tuple[int, int, float] | None = None  # (tokens, rows, seconds)

    @property
    def is_measured(self) -> bool:
        return self._level > 0.0

    def seconds(self, num_tokens: int) -> float:
        """The predicted time; in multiples of a step of one token until a step has been measured."""
        if not self._level:
            return 1.0 + self._prior * (num_tokens - 1)
        return self._level + self._rise(num_tokens)

    def added_seconds(self, num_tokens: int) -> Iterator[float]:
        """What the first token beyond `num_tokens` adds, the second, and so on."""
        if self._sizes:
            yield from self._added_by_sizes(num_tokens)
        index = bisect_right(KNOTS, num_tokens) - 1
        while True:
            slope = self._slopes[index] if self._level else self._prior
            end = KNOTS[index + 1] if index + 1 < len(KNOTS) else num_tokens + 1
            while num_tokens < end:
                yield slope
                num_tokens += 1
            index = min(index + 1, len(KNOTS) - 1)

    def _added_by_sizes(self, num_tokens: int) -> Iterator[float]:
        rise = self._rise(num_tokens)
        while True:
            num_tokens += 1
            before, rise = rise, self._rise(num_tokens)
            yield rise - before

    def share_of_drafts(self, num_rows: int, num_drafts: int) -> float:
        """What draft tokens of one sequence add. Where steps are padded, a share of what those of all would: the first
        tokens may cost a whole size, and those behind them nothing."""
        if self._sizes:
            return (self._rise(num_rows * (1 + num_drafts)) - self._rise(num_rows)) / num_rows
        return sum(islice(self.added_seconds(num_rows), num_drafts))

    def min_slope(self, first: int, last: int) -> float:
        """The least that a token adds to steps of `first` to `last` tokens."""
        if self._sizes:
            return 0.0  # up to the next size
        if not self._level:
            return self._prior
        return min(self._slopes[bisect_right(KNOTS, first) - 1 : bisect_right(KNOTS, last)])

    def look_at(self, num_rows: int) -> None:
        """What is asked next is of steps of about so many sequences."""
        if not self._sizes or (log_rows := num_rows.bit_length()) == self._log_rows:
            return
        if self._num_steps:
            self._levels[self._log_rows] = self._level, self._num_steps
        self._log_rows, self._num_steps = log_rows, 0
        if self._levels:
            nearest = min(self._levels, key=lambda other: abs(other - log_rows))
            level, num_steps = self._levels[nearest]
            self._level, self._num_steps = level, min(num_steps, KEPT_STEPS) if nearest == log_rows else 0

    def record_step(self, num_tokens: int, seconds: float, num_rows: int = 0) -> None:
        """Learn from a step without prompts."""
        self.look_at(num_rows)
        if not self._level:
            self._level = seconds / (1.0 + self._prior * (num_tokens - 1))
            self._spread()
        seconds = min(seconds, MAX_STEP_OUTLIER * self.seconds(num_tokens))
        has_learnt = not self._sizes and self._last is not None and self._last[0] != num_tokens
        if has_learnt and self._last is not None:
            self._learn_slopes(num_tokens, seconds, num_rows, *self._last)
        self._last = num_tokens, num_rows, seconds
        self._num_steps += 1
        weight = max(LEVEL_WEIGHT, 1.0 / self._num_steps)
        self._level += weight * (seconds - self._rise(num_tokens) - self._level)
        self._level = max(self._level, seconds * 1e-3)
        self._num_remembered += 1
        if has_learnt or self._num_steps <= FORGETTING_INTERVAL or self._num_remembered == FORGETTING_INTERVAL:
            self._slopes = [slope * FORGETTING**self._num_remembered for slope in self._slopes]
            self._num_remembered = 0
            self._spread()

    def forget_last(self) -> None:
        """A step of another kind ran: the next one has no predecessor."""
        self._last = None

    def _rise(self, num_tokens: int) -> float:
        """Beyond a step of one token, or of the least size."""
        if self._sizes:
            index = bisect_left(self._sizes, num_tokens)
            if index < len(self._sizes):
                return self._rises[index]
            return (self._level + self._rises[-1]) * num_tokens / self._sizes[-1] - self._level
        index = bisect_right(KNOTS, num_tokens) - 1
        return self._knot_rises[index] + self._slopes[index] * (num_tokens - KNOTS[index])

    def _learn_slopes(
        self, num_tokens: int, seconds: float, num_rows: int, tokens_before: int, rows_before: int, before: float
    ) -> None:
        """Spread the error of the predicted difference evenly over the tokens between both steps."""
        more, less = _shares(max(num_tokens, tokens_before)), _shares(min(num_tokens, tokens_before))
        less += [0.0] * (len(more) - len(less))
        between = [many - few for many, few in zip(more, less, strict=True)]
        difference = (seconds - before) * (1 if num_tokens > tokens_before else -1)
        error = difference - sum(slope * share for slope, share in zip(self._slopes, between, strict=False))
        most = MAX_SURPRISE * self.seconds(max(num_tokens, tokens_before))
        error = min(max(error, -most), most)
        total = sum(between)
        pair_weight = 1.0 if num_rows == rows_before else OTHER_ROWS_WEIGHT
        for index, share in enumerate(between):
            if share:
                weight = max(1.0 / (self._weights[index] + 2.0), MIN_SLOPE_WEIGHT * pair_weight)
                self._slopes[index] += weight * error / total
                self._slopes[index] = min(max(self._slopes[index], 0.0), self._level)
                self._weights[index] += pair_weight
        self._add_up()

    def _spread(self) -> None:
        """Slopes that were not measured are those of the nearest to the left that was, and at most the prior: whether
        tokens cost more there is found out when some are computed."""
        slope = self._prior * self._level
        for index, weight in enumerate(self._weights):
            if weight:
                slope = min(self._slopes[index], self._prior * self._level)
            else:
                self._slopes[index] = slope
        self._add_up()

    def _add_up(self) -> None:
        rises = (slope * width for slope, width in zip(self._slopes, KNOT_WIDTHS, strict=False))
        self._knot_rises = list(accumulate(rises, initial=0.0))


def _shares(num_tokens: int) -> list[float]:
    """How many tokens beyond the first lie behind each knot, up to the next."""
    shares = [float(min(num_tokens, right) - left) for left, right in pairwise(KNOTS) if left < num_tokens]
    if num_tokens > KNOTS[-1]:
        shares.append(float(num_tokens - KNOTS[-1]))
    return shares
