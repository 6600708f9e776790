"""Metrics in the text format of Prometheus. Imported by the first scrape, because `prometheus_client` imports slowly.

Every metric of a model has two names: Quire's, and the one of vLLM's dashboards."""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire import __version__
from quire.server.observe.metric_tables import (
    COUNTERS,
    GAUGES,
    GPU_GAUGES,
    HISTOGRAMS,
    TIER_COUNTERS,
    TRANSFER_COUNTERS,
    TRANSFER_GAUGES,
    ModelMetric,
)
from quire.server.observe.metrics import Metrics, ModelMetrics
from quire.server.observe.nvml import GPUReading, read_gpus

MEDIA_TYPE = CONTENT_TYPE_LATEST
_VLLM_REASONS = {"cancelled": "abort"}  # other reasons have the same name


def prometheus_text(metrics: Metrics) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(metrics))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return families(self._metrics, read_gpus())

    def describe(self) -> list[Metric]:
        return []


def families(metrics: Metrics, gpus: Sequence[GPUReading] = ()) -> Iterator[Metric]:
    """Each metric, followed by its aliases."""
    models = metrics.models
    for kind, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
        for metric in table:
            for name, labels in _names(metric):
                family = kind(name, metric.help, labels=["model_name", *labels])
                for model_name, model in models.items():
                    family.add_metric([model_name, *labels.values()], metric.of(model))
                yield family
    for measured in HISTOGRAMS:
        for name, labels in _names(measured):
            histograms = HistogramMetricFamily(name, measured.help, labels=["model_name", *labels])
            for model_name, model in models.items():
                histogram = measured.of(model)
                histograms.add_metric([model_name, *labels.values()], histogram.buckets(), histogram.sum)
            yield histograms
    yield from _cache_config(models)
    yield from _tiers(models)
    yield from _transfers(models)
    yield from _accepted(models)
    yield from _finished(models)
    yield from _steps(models)
    yield from _gpus(gpus)
    yield from _server(metrics)


def _names(metric: ModelMetric[Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each name with its labels beside `model_name`."""
    yield f"quire_{metric.name}", {}
    for alias in metric.aliases:
        yield f"vllm:{alias}", {"engine": "0"}


class _TwoNames:
    """A metric under Quire's name and under vLLM's, with labels beside `model_name`."""

    def __init__(self, kind: type[CounterMetricFamily | GaugeMetricFamily], name: str, help_text: str, *labels: str):
        self.ours = kind(f"quire_{name}", help_text, labels=["model_name", *labels])
        self.theirs = kind(f"vllm:{name}", help_text, labels=["model_name", "engine", *labels])

    def add(self, model: str, labels: Sequence[str], value: float, their_labels: Sequence[str] | None = None) -> None:
        self.ours.add_metric([model, *labels], value)
        self.theirs.add_metric([model, "0", *(labels if their_labels is None else their_labels)], value)

    def __iter__(self) -> Iterator[Metric]:
        yield self.ours
        yield self.theirs


def _cache_config(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    """Facts in labels, as in vLLM: routers read the size of a cache from them."""
    help_text, labels = "The size of the KV cache, in its labels.", ("block_size", "num_gpu_blocks")
    metric = _TwoNames(GaugeMetricFamily, "cache_config_info", help_text, *labels)
    for name, model in models.items():
        if model.now.num_blocks:
            metric.add(name, [str(model.now.block_size), str(model.now.num_blocks)], 1)
    yield from metric


def _gpus(gpus: Sequence[GPUReading]) -> Iterator[Metric]:
    for name, help_text, value in GPU_GAUGES:
        family = GaugeMetricFamily(f"quire_gpu_{name}", help_text, labels=["gpu", "gpu_name"])
        for gpu in gpus:
            if (reading := value(gpu)) is not None:
                family.add_metric([str(gpu.number), gpu.name], reading)
        yield family


def _tiers(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    counters = {
        name: CounterMetricFamily(f"quire_kv_tier_{name}", help_text, labels=["model_name", "tier"])
        for name, help_text in TIER_COUNTERS.items()
    }
    stored = GaugeMetricFamily(
        "quire_kv_tier_stored_bytes", "Bytes of blocks that a tier holds.", labels=["model_name", "tier"]
    )
    for model_name, model in models.items():
        for tier, name in model.tier_counters:
            counters[name].add_metric([model_name, tier], model.tier_total(tier, name))
        for tier, stats in model.now.tiers.items():
            stored.add_metric([model_name, tier], stats.stored_bytes)
    yield from counters.values()
    yield stored


def _transfers(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    counters = {
        name: CounterMetricFamily(f"quire_kv_transfer_{name}", help_text, labels=["model_name"])
        for name, help_text in TRANSFER_COUNTERS.items()
    }
    gauges = {
        name: GaugeMetricFamily(f"quire_kv_transfer_{name}", help_text, labels=["model_name"])
        for name, help_text in TRANSFER_GAUGES.items()
    }
    for model_name, model in models.items():
        if model.has_transfers:
            for name, counter in counters.items():
                counter.add_metric([model_name], model.transfer_total(name))
            for name, gauge in gauges.items():
                gauge.add_metric([model_name], getattr(model.now.transfers, name, 0))
    yield from counters.values()
    yield from gauges.values()


def _accepted(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    name, help_text = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position; the first is 0."
    metric = _TwoNames(CounterMetricFamily, name, help_text, "position")
    for model_name, model in models.items():
        for position, count in enumerate(model.accepted_at):
            metric.add(model_name, [str(position)], count)
    yield from metric


def _finished(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    help_text = "Requests that ended, by reason."
    metric = _TwoNames(CounterMetricFamily, "request_success", help_text, "finished_reason")
    for name, model in models.items():
        for reason, count in model.finished.items():
            metric.add(name, [reason], count, their_labels=[_VLLM_REASONS.get(reason, reason)])
    yield from metric


def _steps(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    steps = HistogramMetricFamily("quire_step_seconds", "Time of a step, by phase.", labels=["model_name", "phase"])
    for name, model in models.items():
        for phase, histogram in model.step_seconds.items():
            steps.add_metric([name, phase], histogram.buckets(), histogram.sum)
    yield steps


def _server(metrics: Metrics) -> Iterator[Metric]:
    build = GaugeMetricFamily("quire_build_info", "The version that runs.", labels=["version"])
    build.add_metric([__version__], 1)
    yield build
    tenants = CounterMetricFamily("quire_tenant_tokens", "Tokens, by key and kind.", labels=["tenant", "kind"])
    for labels, count in metrics.tenant_tokens.items():
        tenants.add_metric(labels, count)
    yield tenants
    errors = CounterMetricFamily("quire_errors", "Requests answered with an error, by its code.", labels=["code"])
    for code, count in metrics.errors.items():
        errors.add_metric([code], count)
    yield errors
    http = CounterMetricFamily("quire_http_requests", "HTTP requests, by route and status.", labels=["route", "status"])
    for labels, count in metrics.http_requests.items():
        http.add_metric(labels, count)
    yield http
