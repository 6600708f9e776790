"""The one definition of a percentile: a value that was measured."""

from collections.abc import Sequence
from math import ceil


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` percent of them do not exceed."""
    rank = ceil(round(len(values) * share / 100, 9))  # 99.9 % of 1,000 is 999, whatever its last bit says
    return sorted(values)[max(rank, 1) - 1]
