"""The gateway's metrics in the text format of Prometheus. Imported by the first scrape: `prometheus_client` imports
slowly."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.gateway.ledger import UNIT
from quire.gateway.metrics import GatewayMetrics, Labels
from quire.gateway.scaling import scaling_view, served_models
from quire.gateway.worker import Worker
from quire.server.observe.histogram import Histogram

if TYPE_CHECKING:
    from quire.gateway.gateway import Gateway

MEDIA_TYPE = CONTENT_TYPE_LATEST
PREFIX = "quire_gateway_"
WORKER_GAUGES: list[tuple[str, str, Callable[[Worker], float]]] = [
    ("worker_ready", "1 while the worker takes requests.", lambda worker: float(worker.takes_requests)),
    ("worker_requests_in_flight", "Requests that the worker has.", lambda worker: worker.num_in_flight),
    ("worker_tokens_in_flight", "Tokens that they are expected to take.", lambda worker: worker.tokens_in_flight),
    ("worker_connections", "Connections to the worker.", lambda worker: worker.pool.num_open),
]
BREAKER_STATES = ("closed", "half_open", "open")


def prometheus_text(gateway: "Gateway") -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(gateway))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        return gateway_families(self._gateway)

    def describe(self) -> list[Metric]:
        return []


def gateway_families(gateway: "Gateway") -> Iterator[Metric]:
    yield from _counted(gateway.metrics)
    yield from _timed(gateway.metrics)
    yield from _workers(gateway)
    yield from _tenants(gateway)
    away = [((), float(gateway.shared_limits.is_away))] if gateway.shared_limits is not None else []
    yield _gauge("redis_away", "1 while Redis does not answer, where limits are shared.", [], away)
    yield _gauge(
        "model_requests",
        "Requests of the model's workers, and those that wait for one of them.",
        ["model_name", "state"],
        _scaling(gateway),
    )
    yield _gauge("queue_requests", "Requests that wait for a worker.", [], [((), len(gateway.queue))])
    yield _gauge(
        "requests_in_flight", "Requests that the gateway has not answered whole.", [], [((), len(gateway.in_flight))]
    )


def _scaling(gateway: "Gateway") -> Iterator[tuple[tuple[str, str], float]]:
    for model in served_models(gateway):
        view = scaling_view(gateway, model)
        for state in ("waiting", "in_flight"):
            yield (model, state), view[f"requests_{state}"]


def _counted(metrics: GatewayMetrics) -> Iterator[Metric]:
    yield _counter(
        "requests",
        "Requests, by route, model, tenant and status.",
        ["route", "model_name", "tenant", "status"],
        metrics.requests,
    )
    yield _counter("errors", "Errors that the gateway answered itself, by code.", ["code"], _single(metrics.errors))
    yield _counter("decisions", "Requests that each worker has taken.", ["model_name", "worker"], metrics.decisions)
    yield _counter("retries", "Requests that were given to another worker.", ["model_name"], _single(metrics.retries))
    yield _counter("resumes", "Streams that went on at another worker.", ["model_name"], _single(metrics.resumes))
    yield _counter("hedges", "Second attempts that won or lost.", ["model_name", "outcome"], metrics.hedges)
    yield _counter("tokens", "Tokens, by model, tenant and kind.", ["model_name", "tenant", "kind"], metrics.tokens)
    cost = {(tenant,): spent / UNIT for tenant, spent in metrics.cost.items()}
    yield _counter("cost", "What requests cost, in the currency of the prices.", ["tenant"], cost)
    predicted = {(): metrics.predicted_tokens}
    yield _counter(
        "predicted_cached_tokens", "Prompt tokens that were expected in the cache of the worker.", [], predicted
    )


def _timed(metrics: GatewayMetrics) -> Iterator[Metric]:
    yield _histogram(
        "time_to_first_token_seconds", "From arrival to the first event, or to the answer.", metrics.first_token
    )
    yield _histogram("inter_token_latency_seconds", "Between two events of a stream.", metrics.next_token)
    yield _histogram("e2e_request_latency_seconds", "From arrival to the end.", metrics.whole)
    yield _histogram("request_queue_time_seconds", "From arrival until a worker had room.", metrics.queued)


def _workers(gateway: "Gateway") -> Iterator[Metric]:
    workers = gateway.fleet.workers
    for name, help_text, value in WORKER_GAUGES:
        yield _gauge(name, help_text, ["worker"], [((worker.name,), value(worker)) for worker in workers])
    kv_fleet = gateway.kv_fleet
    followed = [worker for worker in workers if kv_fleet.follows(worker)]
    blocks = [((worker.name,), kv_fleet.index.num_blocks(worker.bit)) for worker in followed]
    yield _gauge("worker_kv_blocks", "KV blocks that the worker holds, as its events say.", ["worker"], blocks)
    in_step = [((worker.name,), float(kv_fleet.in_step(worker))) for worker in followed]
    yield _gauge("worker_kv_in_step", "1 while no event of the worker is missing.", ["worker"], in_step)
    gaps = {(worker.name,): kv_fleet.num_gaps(worker) for worker in followed}
    yield _counter("worker_kv_gaps", "Times that events of the worker were missing.", ["worker"], gaps)
    failures = {(worker.name,): worker.num_failures for worker in workers}
    yield _counter("worker_failures", "Requests that the worker has failed.", ["worker"], failures)
    opened = {(worker.name,): worker.breaker.num_opened for worker in workers}
    yield _counter("breaker_opened", "Times the circuit breaker of the worker has opened.", ["worker"], opened)
    states = [
        ((worker.name, state), float(worker.breaker.state == state)) for worker in workers for state in BREAKER_STATES
    ]
    yield _gauge("breaker_state", "1 for the state that the circuit breaker is in.", ["worker", "state"], states)


def _tenants(gateway: "Gateway") -> Iterator[Metric]:
    tenants = gateway.tenants.accounts()
    limits = [((each.name,), each.budget.limit / UNIT) for each in tenants if each.budget.limit is not None]
    yield _gauge("budget_limit", "The budget of the tenant, of its period.", ["tenant"], limits)
    left = [((each.name,), each.budget.left / UNIT) for each in tenants if each.budget.left is not None]
    yield _gauge("budget_left", "What is left of it in this period.", ["tenant"], left)
    running = [((each.name,), each.quota.running) for each in tenants]
    yield _gauge("tenant_requests_in_flight", "Completions that the tenant has in flight.", ["tenant"], running)


def _single(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(label,): count for label, count in counts.items()}


def _counter(name: str, help: str, labels: list[str], counts: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, help, labels=labels)
    for values, count in counts.items():
        family.add_metric(list(values), count)
    return family


def _gauge(name: str, help: str, labels: list[str], values: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, help, labels=labels)
    for label_values, value in values:
        family.add_metric(list(label_values), value)
    return family


def _histogram(name: str, help: str, histograms: Mapping[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(PREFIX + name, help, labels=["model_name", "tenant"])
    for labels, histogram in histograms.items():
        family.add_metric(list(labels), histogram.buckets(), histogram.sum)
    return family
