"""What requests cost, and budgets: all arithmetic of money, in whole billionths, so that sums are exact.

A budget is a small value (month, spent, reserved). One gateway keeps it in memory; several share it in Redis."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import QuireError
from quire.gateway.config import TokenPrices
from quire.gateway.usage import TokenUsage

UNIT = 10**9  # of the currency of the configuration
MILLION = 10**6  # prices are for so many tokens
SECONDS_TO_RETRY = 2  # while requests in flight hold the rest of a budget

WallClock = Callable[[], float]


class OverBudget(QuireError):
    status, code = 429, "budget_exceeded"

    def __init__(self, message: str, hint: str, retry_after: int) -> None:
        super().__init__(message, hint)
        self.retry_after = retry_after


def cost(usage: TokenUsage, price: TokenPrices | None) -> int:
    """In billionths."""
    if price is None:
        return 0
    cached_price = price.prompt if price.cached is None else price.cached
    computed = max(usage.prompt - usage.cached, 0)
    return sum(
        tokens * round(each * UNIT) // MILLION
        for tokens, each in ((computed, price.prompt), (usage.cached, cached_price), (usage.output, price.output))
    )


def month_of(seconds: float) -> tuple[int, int]:
    moment = time.gmtime(seconds)
    return moment.tm_year, moment.tm_mon


def seconds_left_in_month(seconds: float) -> int:
    import calendar

    year, month = month_of(seconds)
    following = (year + month // 12, month % 12 + 1, 1, 0, 0, 0)
    return max(1, int(calendar.timegm(following) - seconds))


@dataclass(slots=True)
class Budget:
    """A request is admitted while what is spent and what is reserved are below the limit. It reserves its expected cost
    and, when it has ended, spends what it took: the limit is passed by one request at most."""

    tenant: str
    limit: int | None  # billionths a month; None: no limit
    clock: WallClock = time.time
    month: tuple[int, int] = (0, 0)
    spent: int = 0
    reserved: int = 0

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
        self.month = month_of(self.clock())
        self.spent, self.reserved = spent, reserved

    @property
    def left(self) -> int | None:
        self._turn()
        return None if self.limit is None else max(self.limit - self.spent, 0)

    def _turn(self) -> None:
        month = month_of(self.clock())
        if month != self.month:
            self.month, self.spent = month, 0

    def _refuse(self, limit: int) -> None:
        shown = f"{limit / UNIT:g}"
        if self.spent < limit:
            message = f"requests in flight hold the rest of the monthly budget of {shown} of key `{self.tenant}`"
            raise OverBudget(message, "try again when they have ended", SECONDS_TO_RETRY)
        message = f"key `{self.tenant}` has spent its monthly budget of {shown}"
        raise OverBudget(message, "it begins anew on the first of the month, UTC", seconds_left_in_month(self.clock()))
