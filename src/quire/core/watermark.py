"""A watermark in the sampled tokens: invisible to a reader, detectable by statistics (docs/watermark.md)."""

from dataclasses import dataclass
from math import floor, isfinite

from quire.core.errors import BadRequest

# The defaults of Text Generation Inference. This key is public.
DEFAULT_GAMMA, DEFAULT_DELTA, DEFAULT_KEY = 0.5, 2.0, 15485863


@dataclass(frozen=True, slots=True)
class Watermark:
    """A hash of each token marks a fraction of the vocabulary as green for the next one; green tokens are favoured."""

    gamma: float = DEFAULT_GAMMA  # the green fraction of the vocabulary
    delta: float = DEFAULT_DELTA  # added to the logits of green tokens
    key: int = DEFAULT_KEY  # 64 bits; with it the watermark can be detected, and removed

    def __post_init__(self) -> None:
        if not 0.0 < self.gamma < 1.0:
            raise BadRequest(f"gamma is {self.gamma}", "gamma must be between 0 and 1", param="watermark")
        if not (isfinite(self.delta) and 0.0 < self.delta <= 100.0):
            raise BadRequest(f"delta is {self.delta}", "delta must be above 0 and at most 100", param="watermark")
        if not 0 <= self.key < 2**64:
            raise BadRequest(f"key is {self.key}", "64 bits are kept", param="watermark")

    @property
    def green_below(self) -> int:
        """Every token has a random 32-bit number; it is green if the number is below this one."""
        return floor(self.gamma * 2.0**32)
