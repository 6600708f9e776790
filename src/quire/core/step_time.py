"""How large a step may be while somebody waits for its next token."""

import sys

RATE_EMA_WEIGHT = 0.3  # what one step's pace counts for


class StepTimeController:
    """Steps with prompts are timed. Of what they reach, as many tokens are allowed as take about `seconds`."""

    def __init__(self, seconds: float) -> None:
        """0: a step may take as long as it likes."""
        self._seconds = seconds
        self._rate = 0.0  # tokens a second; 0: not known yet

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """A step that held prompts has ended."""
        if self._seconds and seconds > 0:
            rate = num_tokens / seconds
            if self._rate:  # a step that something else held up is soon forgotten
                rate = min(max(rate, self._rate / 2), self._rate * 2)
            self._rate += (rate - self._rate) * (RATE_EMA_WEIGHT if self._rate else 1.0)

    @property
    def max_tokens(self) -> int:
        """Of one step, at most."""
        return int(self._rate * self._seconds) if self._rate else sys.maxsize
