"""Counters and histograms of the gateway. exposition.py makes their text."""

from collections import Counter

from quire.gateway.exchange_record import ExchangeRecord
from quire.gateway.routes import route_label
from quire.gateway.usage import TokenUsage
from quire.server.observe.histogram import Histogram

SECONDS = [m * 10.0**e for e in range(-3, 2) for m in (1, 2.5, 5)] + [100.0, 250.0, 600.0]  # 1 ms .. 10 min

Labels = tuple[str, str]  # model, tenant


class GatewayMetrics:
    """Names of models and tenants come from the configuration and from workers, never from clients."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str, str]] = Counter()  # by route, model, tenant, status
        self.errors: Counter[str] = Counter()  # by code
        self.decisions: Counter[tuple[str, str]] = Counter()  # by model and worker
        self.retries: Counter[str] = Counter()  # by model
        self.resumes: Counter[str] = Counter()  # by model
        self.hedges: Counter[tuple[str, str]] = Counter()  # by model and outcome
        self.tokens: Counter[tuple[str, str, str]] = Counter()  # by model, tenant, kind
        self.cost: Counter[str] = Counter()  # by tenant, in billionths
        self.first_token: dict[Labels, Histogram] = {}
        self.next_token: dict[Labels, Histogram] = {}
        self.whole: dict[Labels, Histogram] = {}
        self.queued: dict[Labels, Histogram] = {}
        self.predicted_tokens = 0.0  # prompt tokens that the chosen worker was believed to have cached

    def refused(self, code: str) -> None:
        """Count a request that was refused before it had a route."""
        self.errors[code] += 1

    def retried(self, record: ExchangeRecord) -> None:
        self.retries[record.model or ""] += 1

    def resumed(self, record: ExchangeRecord) -> None:
        self.resumes[record.model or ""] += 1

    def hedged(self, record: ExchangeRecord, won: bool) -> None:
        self.hedges[record.model or "", "won" if won else "lost"] += 1

    def token(self, record: ExchangeRecord, seconds: float, count: int) -> None:
        _of(self.next_token, record).observe(seconds / count, count)

    def ended(self, record: ExchangeRecord, worker: str, usage: TokenUsage, cost: int, now: float) -> None:
        model, tenant = record.model or "", record.tenant.name
        self.requests[route_label(record.request.path), model, tenant, str(record.status)] += 1
        if record.error:
            self.errors[record.error] += 1
        if not worker:
            return
        self.decisions[model, worker] += 1
        self.cost[tenant] += cost
        self.predicted_tokens += record.context.predicted_hit * record.prompt_tokens
        for kind, count in (("prompt", usage.prompt), ("cached", usage.cached), ("output", usage.output)):
            self.tokens[model, tenant, kind] += count
        _of(self.queued, record).observe(record.queue_seconds)
        _of(self.whole, record).observe(now - record.began)
        if record.first_token is not None:
            _of(self.first_token, record).observe(record.first_token - record.began)


def _of(histograms: dict[Labels, Histogram], record: ExchangeRecord) -> Histogram:
    labels = (record.model or "", record.tenant.name)
    if labels not in histograms:
        histograms[labels] = Histogram(SECONDS)
    return histograms[labels]
