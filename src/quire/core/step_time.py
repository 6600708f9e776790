"""How many tokens a step may have while sequences decode: prompts must not delay their next tokens."""

import sys

RATE_EMA_WEIGHT = 0.3  # of one step in the moving average of tokens per second
RESUMING_SECONDS = 0.5  # of a step while resumed sequences catch up: their clients wait longer than those of others


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

    def max_tokens(self, is_resuming: bool) -> int:
        """The token budget of one step. `is_resuming`: resumed sequences are to catch up in it."""
        seconds = max(self._target_seconds, RESUMING_SECONDS) if is_resuming else self._target_seconds
        return int(self._rate * seconds) if self._rate else sys.maxsize
