"""Metrics as Prometheus reads them. Imported when it first asks: `prometheus_client` takes a while to import.

Every number of a model has two names: ours, and the one that dashboards made for vLLM ask for."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire import __version__
from quire.server.observe.histogram import Histogram
from quire.server.observe.metrics import Metrics, ModelMetrics

MEDIA_TYPE = CONTENT_TYPE_LATEST


class ScalarMetric(NamedTuple):
    name: str  # after quire_
    aliases: tuple[str, ...]  # after vllm:
    help: str
    of: Callable[[ModelMetrics], float]


class HistogramMetric(NamedTuple):
    name: str
    aliases: tuple[str, ...]
    help: str
    of: Callable[[ModelMetrics], Histogram]


GAUGES = [
    ScalarMetric(
        "num_requests_running",
        ("num_requests_running",),
        "Sequences that take part in steps.",
        lambda model: model.now.running,
    ),
    ScalarMetric(
        "num_requests_waiting",
        ("num_requests_waiting",),
        "Sequences that wait to be admitted.",
        lambda model: model.now.waiting,
    ),
    ScalarMetric(
        "kv_cache_usage_ratio",
        ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "Blocks of the KV cache held by sequences, of all blocks.",
        lambda model: model.now.held_blocks / model.now.num_blocks if model.now.num_blocks else 0.0,
    ),
    ScalarMetric(
        "kv_cache_waste_ratio",
        (),
        "Slots of held blocks that no token occupies, of all slots of held blocks.",
        lambda model: 1.0 - model.now.used_slots / model.now.held_slots if model.now.held_slots else 0.0,
    ),
    ScalarMetric("model_loaded", (), "1 while there is an engine for the model.", lambda model: model.is_loaded),
    ScalarMetric("kv_cache_blocks", (), "Blocks of the KV cache.", lambda model: model.now.num_blocks),
    ScalarMetric(
        "kv_cache_cached_blocks",
        (),
        "Free blocks that still carry a reusable prefix.",
        lambda model: model.now.cached_blocks,
    ),
]

COUNTERS = [
    ScalarMetric(
        "prompt_tokens", ("prompt_tokens",), "Prompt tokens of requests that ended.", lambda m: m.prompt_tokens
    ),
    ScalarMetric(
        "prompt_tokens_cached",
        ("prompt_tokens_cached",),
        "Prompt tokens of requests that ended which came from the cache.",
        lambda model: model.cached_tokens,
    ),
    ScalarMetric("generation_tokens", ("generation_tokens",), "Tokens drawn.", lambda model: model.generation_tokens),
    ScalarMetric(
        "prefix_cache_queries",
        ("prefix_cache_queries",),
        "Prompt tokens looked up in the cache.",
        lambda model: model.total("prefix_queries"),
    ),
    ScalarMetric(
        "prefix_cache_hits",
        ("prefix_cache_hits",),
        "Prompt tokens found in the cache.",
        lambda model: model.total("prefix_hits"),
    ),
    ScalarMetric(
        "preemptions",
        ("num_preemptions",),
        "Sequences put back to make room.",
        lambda model: model.total("preemptions"),
    ),
    ScalarMetric(
        "spec_decode_num_drafts",
        ("spec_decode_num_drafts",),
        "Times that guesses at a sequence's next tokens were computed.",
        lambda model: model.total("drafts"),
    ),
    ScalarMetric(
        "spec_decode_num_draft_tokens",
        ("spec_decode_num_draft_tokens",),
        "Tokens guessed and computed.",
        lambda model: model.total("draft_tokens"),
    ),
    ScalarMetric(
        "spec_decode_num_accepted_tokens",
        ("spec_decode_num_accepted_tokens",),
        "Tokens guessed that were then drawn.",
        lambda model: model.total("accepted_tokens"),
    ),
    ScalarMetric("model_loads", (), "Times it was loaded.", lambda model: model.loads),
    ScalarMetric("engine_restarts", (), "Times the engine died and was started again.", lambda model: model.restarts),
]

HISTOGRAMS = [
    HistogramMetric(
        "time_to_first_token_seconds",
        ("time_to_first_token_seconds",),
        "From arrival to the first token.",
        lambda model: model.first_token,
    ),
    HistogramMetric(
        "inter_token_latency_seconds",
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        "Between a sample's tokens.",
        lambda model: model.next_token,
    ),
    HistogramMetric(
        "time_per_output_token_seconds",
        ("request_time_per_output_token_seconds",),
        "Mean of a request, after its first token.",
        lambda model: model.per_token,
    ),
    HistogramMetric(
        "request_queue_time_seconds",
        ("request_queue_time_seconds",),
        "From arrival to the first step that computes some of the request.",
        lambda model: model.queue,
    ),
    HistogramMetric(
        "request_prefill_time_seconds",
        ("request_prefill_time_seconds",),
        "From its first step to the first token.",
        lambda model: model.prefill,
    ),
    HistogramMetric(
        "request_inference_time_seconds",
        ("request_inference_time_seconds",),
        "From its first step to the last token.",
        lambda model: model.inference,
    ),
    HistogramMetric(
        "e2e_request_latency_seconds",
        ("e2e_request_latency_seconds",),
        "From arrival to the end.",
        lambda model: model.whole,
    ),
    HistogramMetric(
        "request_decode_time_seconds",
        ("request_decode_time_seconds",),
        "From the first token to the last.",
        lambda model: model.decode,
    ),
    HistogramMetric(
        "request_prompt_tokens",
        ("request_prompt_tokens",),
        "Prompt tokens of a request.",
        lambda model: model.request_prompt,
    ),
    HistogramMetric(
        "request_generation_tokens",
        ("request_generation_tokens",),
        "Tokens drawn for a request.",
        lambda model: model.request_output,
    ),
    HistogramMetric(
        "request_params_max_tokens",
        ("request_params_max_tokens",),
        "What requests ask for at most.",
        lambda model: model.request_max_tokens,
    ),
    HistogramMetric("request_params_n", ("request_params_n",), "Samples of a request.", lambda m: m.request_samples),
    HistogramMetric("step_tokens", ("iteration_tokens_total",), "Tokens computed in a step.", lambda m: m.step_tokens),
]

_VLLM_REASONS = {"cancelled": "abort"}  # the others are called the same


def prometheus_text(metrics: Metrics) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(metrics))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return families(self._metrics)

    def describe(self) -> list[Metric]:
        return []


def families(metrics: Metrics) -> Iterator[Metric]:
    """Each of ours, followed by its aliases."""
    models = metrics.models
    for gauge in GAUGES:
        for name, labels in _names(gauge):
            shown = GaugeMetricFamily(name, gauge.help, labels=["model_name", *labels])
            for model, found in models.items():
                shown.add_metric([model, *labels.values()], gauge.of(found))
            yield shown
    for counter in COUNTERS:
        for name, labels in _names(counter):
            counted = CounterMetricFamily(name, counter.help, labels=["model_name", *labels])
            for model, found in models.items():
                counted.add_metric([model, *labels.values()], counter.of(found))
            yield counted
    for distribution in HISTOGRAMS:
        for name, labels in _names(distribution):
            spread = HistogramMetricFamily(name, distribution.help, labels=["model_name", *labels])
            for model, found in models.items():
                histogram = distribution.of(found)
                spread.add_metric([model, *labels.values()], histogram.buckets(), histogram.sum)
            yield spread
    yield from _accepted(models)
    yield from _finished(models)
    yield from _steps(models)
    yield from _server(metrics)


def _names(number: ScalarMetric | HistogramMetric) -> Iterator[tuple[str, dict[str, str]]]:
    """Each with the labels it has beside the model's name."""
    yield f"quire_{number.name}", {}
    for alias in number.aliases:
        yield f"vllm:{alias}", {"engine": "0"}


def _accepted(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    name, help_text = "spec_decode_num_accepted_tokens_per_pos", "The same by their place: first guesses are 0."
    ours = CounterMetricFamily(f"quire_{name}", help_text, labels=["model_name", "position"])
    theirs = CounterMetricFamily(f"vllm:{name}", help_text, labels=["model_name", "engine", "position"])
    for model, found in models.items():
        for position, count in enumerate(found.accepted_at):
            ours.add_metric([model, str(position)], count)
            theirs.add_metric([model, "0", str(position)], count)
    yield ours
    yield theirs


def _finished(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    help_text = "Requests that ended, by reason."
    ours = CounterMetricFamily("quire_request_success", help_text, labels=["model_name", "finished_reason"])
    theirs = CounterMetricFamily("vllm:request_success", help_text, labels=["model_name", "engine", "finished_reason"])
    for name, model in models.items():
        for reason, count in model.finished.items():
            ours.add_metric([name, reason], count)
            theirs.add_metric([name, "0", _VLLM_REASONS.get(reason, reason)], count)
    yield ours
    yield theirs


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
