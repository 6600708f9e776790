"""How many requests may be hedged."""

MAX_CREDIT = 10.0  # hedges that may follow each other at once


class HedgeCredit:
    """Limits hedging to a share of all requests: where everything is slow, second attempts make it slower."""

    def __init__(self) -> None:
        self._credit = 1.0

    def earn(self, ratio: float) -> None:
        """A request was sent."""
        self._credit = min(self._credit + ratio, MAX_CREDIT)

    def spend(self) -> bool:
        """-> whether one more may be hedged"""
        if self._credit < 1.0:
            return False
        self._credit -= 1.0
        return True
