"""What is counted of a key, or of a group of keys: the limits, and what was used of them."""

from quire.core.errors import QuireError
from quire.gateway.ledger import Budget
from quire.server.access.quota import Quota, QuotaLimits


class Account:
    def __init__(self, name: str, quota: Quota, budget: Budget) -> None:
        self.name, self.quota, self.budget = name, quota, budget

    @property
    def is_limited(self) -> bool:
        return self.budget.limit is not None or self.quota.limits != QuotaLimits()

    def enter(self, num: int, amount: int) -> None:
        """Count a request of `num` completions that may cost `amount`, or raise why it may not begin."""
        quota = self.quota
        quota.check_concurrency(num, num)
        quota.enter()
        quota.running += num - 1
        try:
            self.budget.reserve(amount)
        except QuireError:
            quota.running -= num
            raise

    def leave(self, num: int, reserved: int, spent: int, tokens: int) -> None:
        """A request that has entered has ended."""
        self.quota.running -= num
        self.quota.charge(tokens)
        self.budget.settle(reserved, spent)
