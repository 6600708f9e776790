"""A mark in the choice of tokens that a reader cannot see and a statistic can (docs/watermark.md)."""

from dataclasses import dataclass
from math import floor, isfinite

from quire.core.errors import BadRequest

# Those of Text Generation Inference. Everybody knows this key.
DEFAULT_GAMMA, DEFAULT_DELTA, DEFAULT_KEY = 0.5, 2.0, 15485863


@dataclass(frozen=True, slots=True)
class Watermark:
    """After each token a part of the vocabulary, told by a hash of that token, is green; green tokens are favoured."""

    gamma: float = DEFAULT_GAMMA  # the part of the vocabulary that is green
    delta: float = DEFAULT_DELTA  # added to the logits of green tokens
    key: int = DEFAULT_KEY  # whoever knows it can find the mark, and remove it; 64 bits

    def __post_init__(self) -> None:
        if not 0.0 < self.gamma < 1.0:
            raise BadRequest(f"gamma is {self.gamma}", "gamma must be between 0 and 1", param="watermark")
        if not (isfinite(self.delta) and 0.0 < self.delta <= 100.0):
            raise BadRequest(f"delta is {self.delta}", "delta must be above 0 and at most 100", param="watermark")
        if not 0 <= self.key < 2**64:
            raise BadRequest(f"key is {self.key}", "64 bits are kept", param="watermark")

    @property
    def green_below(self) -> int:
        """Every token has 32 random bits; it is green if they are a number below this one."""
        return floor(self.gamma * 2.0**32)
