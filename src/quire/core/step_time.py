"""How many tokens a step may have while sequences decode: prompts must not delay their next tokens."""

import sys

RATE_EMA_WEIGHT = 0.3  # of one step in the moving average of tokens per second


class StepTimeController:
    """Measures the tokens per second of steps with prompts; allows as many tokens as take about `target_seconds`."""

    def __init__(self, target_seconds: float) -> None:
        """0: no limit."""
        self._target_seconds = target_seconds
        self.tokens_per_second = 0.0  # 0: not measured yet

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step with prompts."""
        if seconds > 0:
            rate = num_tokens / seconds
            before = self.tokens_per_second
            if before:  # bounds the effect of a step that something delayed
                rate = min(max(rate, before / 2), before * 2)
            self.tokens_per_second += (rate - before) * (RATE_EMA_WEIGHT if before else 1.0)

    @property
    def max_tokens(self) -> int:
        """Of one step."""
        has_limit = self._target_seconds and self.tokens_per_second
        return int(self.tokens_per_second * self._target_seconds) if has_limit else sys.maxsize
