"""How many tokens a step may have while sequences decode: prompts must not delay their next tokens."""

import sys

RATE_EMA_WEIGHT = 0.3  # of one step in the moving average of tokens per second


class StepTimeController:
    """Measures the tokens per second of steps with prompts; allows as many tokens as take about `target_seconds`."""

    def __init__(self, target_seconds: float) -> None:
        """0: no limit."""
        self._target_seconds = target_seconds
        self._rate = 0.0  # tokens per second; 0: not measured yet

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step with prompts."""
        if self._target_seconds and seconds > 0:
            rate = num_tokens / seconds
            if self._rate:  # bounds the effect of a step that something delayed
                rate = min(max(rate, self._rate / 2), self._rate * 2)
            self._rate += (rate - self._rate) * (RATE_EMA_WEIGHT if self._rate else 1.0)

    @property
    def max_tokens(self) -> int:
        """Of one step."""
        return int(self._rate * self._target_seconds) if self._rate else sys.maxsize
