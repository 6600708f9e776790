"""Metrics as Prometheus reads them. Imported when it first asks: `prometheus_client` takes a while to import."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire import __version__
from quire.server.metrics import Metrics

MEDIA_TYPE = CONTENT_TYPE_LATEST


def prometheus_text(metrics: Metrics) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(metrics))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from _gauges(self._metrics)
        yield from _counters(self._metrics)
        yield from _histograms(self._metrics)

    def describe(self) -> list[Metric]:
        return []


def _gauges(metrics: Metrics) -> Iterator[Metric]:
    now = metrics.now
    usage = now.held_blocks / now.num_blocks if now.num_blocks else 0.0
    waste = 1.0 - now.used_slots / now.held_slots if now.held_slots else 0.0
    for name, help_text, value in (
        ("num_requests_running", "Sequences that take part in steps.", now.running),
        ("num_requests_waiting", "Sequences that wait to be admitted.", now.waiting),
        ("kv_cache_usage_ratio", "Blocks of the KV cache held by sequences, of all blocks.", usage),
        ("kv_cache_waste_ratio", "Slots of held blocks that no token occupies, of all slots of held blocks.", waste),
        ("kv_cache_blocks", "Blocks of the KV cache.", now.num_blocks),
        ("kv_cache_cached_blocks", "Free blocks that still carry a reusable prefix.", now.cached_blocks),
    ):
        yield GaugeMetricFamily(f"quire_{name}", help_text, value)
    build = GaugeMetricFamily("quire_build_info", "The version that runs.", labels=["version"])
    build.add_metric([__version__], 1)
    yield build


def _counters(metrics: Metrics) -> Iterator[Metric]:
    for name, help_text, value in (
        ("prompt_tokens", "Prompt tokens computed; those found in the cache are not.", metrics.prompt_tokens),
        ("generation_tokens", "Tokens drawn.", metrics.generation_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up in the cache.", metrics.total("prefix_queries")),
        ("prefix_cache_hits", "Prompt tokens found in the cache.", metrics.total("prefix_hits")),
        ("preemptions", "Sequences put back to make room.", metrics.total("preemptions")),
        ("engine_restarts", "Times the engine died and was started again.", metrics.restarts),
    ):
        yield CounterMetricFamily(f"quire_{name}", help_text, value)
    ended = CounterMetricFamily("quire_request_success", "Requests that ended, by reason.", labels=["finished_reason"])
    for reason, count in metrics.finished.items():
        ended.add_metric([reason], count)
    yield ended
    tenants = CounterMetricFamily("quire_tenant_tokens", "Tokens, by key and kind.", labels=["tenant", "kind"])
    for labels, count in metrics.tenant_tokens.items():
        tenants.add_metric(labels, count)
    yield tenants
    http = CounterMetricFamily("quire_http_requests", "HTTP requests, by route and status.", labels=["route", "status"])
    for labels, count in metrics.http_requests.items():
        http.add_metric(labels, count)
    yield http


def _histograms(metrics: Metrics) -> Iterator[Metric]:
    for name, help_text, histogram in (
        ("time_to_first_token_seconds", "From arrival to the first token.", metrics.first_token),
        ("inter_token_latency_seconds", "Between a sample's tokens.", metrics.next_token),
        ("time_per_output_token_seconds", "Mean of a request, after its first token.", metrics.per_token),
        ("e2e_request_latency_seconds", "From arrival to the end.", metrics.whole),
        ("request_prompt_tokens", "Prompt tokens of a request.", metrics.request_prompt),
        ("request_generation_tokens", "Tokens drawn for a request.", metrics.request_output),
        ("step_tokens", "Tokens computed in a step.", metrics.step_tokens),
    ):
        yield HistogramMetricFamily(f"quire_{name}", help_text, histogram.buckets(), histogram.sum)
    steps = HistogramMetricFamily("quire_step_seconds", "Time of a step, by phase.", labels=["phase"])
    for phase, histogram in metrics.step_seconds.items():
        steps.add_metric([phase], histogram.buckets(), histogram.sum)
    yield steps
