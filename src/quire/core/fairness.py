"""Weighted virtual token counters: of the tenants that wait, the one that has had least of its share is next.

A tenant's counter grows by the tokens of its requests, divided by its weight. One that comes back after a pause is
lifted to the others, so that it cannot save up. Two tenants that always wait get service in proportion to their
weights, apart by at most twice the largest request."""

from collections.abc import Collection, Mapping


class VirtualCounters:
    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._level = 0.0  # the counter of the tenant that was served last, when it was

    def arrives(self, tenant: str, others: Collection[str]) -> None:
        """The tenant begins to wait; `others` wait already."""
        level = min((self._counters.get(other, 0.0) for other in others), default=self._level)
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), level)

    def next(self, waiting: Collection[str]) -> list[str]:
        """The waiting tenants, in the order in which they should be served."""
        return sorted(waiting, key=lambda tenant: (self._counters.get(tenant, 0.0), tenant))

    def serve(self, tenant: str, tokens: float, weight: float) -> None:
        """A request of the tenant begins, and takes so many tokens."""
        counter = self._counters.get(tenant, 0.0)
        self._level = max(self._level, counter)
        self._counters[tenant] = counter + tokens / weight

    def correct(self, tenant: str, tokens: float, weight: float) -> None:
        """Count the tokens that a request took beyond those it was charged with (negative: fewer)."""
        self._counters[tenant] = self._counters.get(tenant, 0.0) + tokens / weight

    def values(self) -> Mapping[str, float]:
        return self._counters
