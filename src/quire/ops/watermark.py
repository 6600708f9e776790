"""Watermarks in numpy: which tokens they favour, as the samplers compute it, and how they are detected.
docs/watermark.md"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import erfc, sqrt

import numpy as np
from numpy.typing import NDArray

from quire.core.watermark import Watermark
from quire.ops.philox import MASK32, philox4x32

DOMAIN = 1  # the last word of the counter. Sampling has 0 there, so the two never share a random number


def green_tokens(mark: Watermark, before: int, vocab: int) -> NDArray[np.bool_]:
    """[vocab]: which tokens are green after the token `before`. One Philox call serves four neighbouring tokens."""
    fours = np.arange(-(-vocab // 4), dtype=np.uint64)
    words = philox4x32((before, fours, 0, DOMAIN), (mark.key & MASK32, mark.key >> 32))
    return np.stack(words, axis=1).reshape(-1)[:vocab] < mark.green_below


def is_green(mark: Watermark, before: int, token: int) -> bool:
    words = philox4x32((before, token // 4, 0, DOMAIN), (mark.key & MASK32, mark.key >> 32))
    return bool(words[token % 4] < mark.green_below)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence that a text is watermarked."""

    scored: int  # pairs of neighbouring tokens, each counted once
    green: int  # pairs whose second token is green
    z: float  # standard deviations above the mean of unmarked text

    @property
    def p_value(self) -> float:
        """The probability that an unmarked text has as many green tokens, or more."""
        return 0.5 * erfc(self.z / sqrt(2.0))


def detect(mark: Watermark, ids: Sequence[int]) -> Evidence:
    """A repeated pair is no new evidence: its second token is green or not, as it was the first time."""
    pairs = set(pairwise(ids))
    green = sum(is_green(mark, before, token) for before, token in pairs)
    deviation = sqrt(len(pairs) * mark.gamma * (1.0 - mark.gamma))
    return Evidence(len(pairs), green, (green - mark.gamma * len(pairs)) / deviation if pairs else 0.0)
