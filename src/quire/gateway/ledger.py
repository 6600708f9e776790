"""What requests cost, and budgets: all arithmetic of money, in whole billionths, so that sums are exact.

A budget is a small value (period, spent, reserved). One gateway keeps it in memory; several share it in Redis."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import QuireError
from quire.gateway.budget_periods import BEGINS_ANEW, BudgetPeriod, period_end, period_label
from quire.gateway.config import TokenPrices
from quire.gateway.usage import TokenUsage

UNIT = 10**9  # of the currency of the configuration
MILLION = 10**6  # prices are for so many tokens
SECONDS_TO_RETRY = 2  # while requests in flight hold the rest of a budget

KINDS = {
    "hour": "hourly budget",
    "day": "daily budget",
    "week": "weekly budget",
    "month": "monthly budget",
    "total": "budget",
}

WallClock = Callable[[], float]


class OverBudget(QuireError):
    status, code = 429, "budget_exceeded"

    def __init__(self, message: str, hint: str, retry_after: int | None) -> None:
        """`retry_after`: seconds, None where waiting does not help."""
        super().__init__(message, hint)
        self.retry_after = retry_after


def cost(usage: TokenUsage, price: TokenPrices | None) -> int:
    """What tokens cost, in billionths of the unit of prices."""
    if price is None:
        return 0
    cached_price = price.prompt if price.cached is None else price.cached
    computed = max(usage.prompt - usage.cached, 0)
    return sum(
        tokens * round(each * UNIT) // MILLION
        for tokens, each in ((computed, price.prompt), (usage.cached, cached_price), (usage.output, price.output))
    )


@dataclass(slots=True)
class Budget:
    """A request is admitted while what is spent and what is reserved are below the limit. It reserves its expected cost
    and, when it has ended, spends what it took: the limit is passed by one request at most."""

    tenant: str
    limit: int | None  # billionths in a period; None: no limit
    clock: WallClock = time.time
    period: BudgetPeriod = "month"
    label: str = ""  # of the period in which `spent` was spent
    ends_at: float = 0.0  # when the next one begins
    spent: int = 0
    reserved: int = 0

    def change(self, limit: int | None, period: BudgetPeriod) -> None:
        """Another limit. What was spent in a period of another kind is not carried over."""
        self.limit = limit
        if period != self.period:
            self.period, self.ends_at = period, 0.0

    def reserve(self, amount: int) -> None:
        """Raises OverBudget."""
        if self.limit is not None:
            self._turn()
            if self.spent + self.reserved >= self.limit:
                self._refuse(self.limit)
        self.reserved += amount

    def settle(self, reserved: int, spent: int) -> None:
        """A request that reserved so much has ended."""
        self._turn()
        self.reserved -= reserved
        self.spent += spent

    def adopt(self, spent: int, reserved: int) -> None:
        """Take over what is counted elsewhere."""
        self._turn()
        self.spent, self.reserved = spent, reserved

    def restore(self, label: str, spent: int) -> None:
        """Take over what was spent before a restart, unless another period has begun since."""
        self._turn()
        if label == self.label:
            self.spent += spent

    @property
    def left(self) -> int | None:
        self._turn()
        return None if self.limit is None else max(self.limit - self.spent, 0)

    def _turn(self) -> None:
        now = self.clock()
        if now >= self.ends_at:
            self.label, self.ends_at, self.spent = period_label(self.period, now), period_end(self.period, now), 0

    def _refuse(self, limit: int) -> None:
        kind, shown = KINDS[self.period], f"{limit / UNIT:g}"
        if self.spent < limit:
            message = f"requests in flight hold the rest of the {kind} of {shown} of key `{self.tenant}`"
            raise OverBudget(message, "try again when they have ended", SECONDS_TO_RETRY)
        wait = None if math.isinf(self.ends_at) else max(1, int(self.ends_at - self.clock()))
        raise OverBudget(f"key `{self.tenant}` has spent its {kind} of {shown}", BEGINS_ANEW[self.period], wait)
