"""Metrics in the text format of Prometheus. Imported by the first scrape, because `prometheus_client` imports slowly.

Every metric of a model has two names: Quire's, and the one of vLLM's dashboards."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire import __version__
from quire.server.observe.histogram import Histogram
from quire.server.observe.metrics import Metrics, ModelMetrics
from quire.server.observe.nvml import GPUReading, read_gpus

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
    ScalarMetric("engines_ready", (), "Engines of the model that take requests.", lambda model: model.num_ready()),
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
    ScalarMetric("generation_tokens", ("generation_tokens",), "Tokens sampled.", lambda model: model.generation_tokens),
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
        "Sequences preempted to make room.",
        lambda model: model.total("preemptions"),
    ),
    ScalarMetric(
        "spec_decode_num_drafts",
        ("spec_decode_num_drafts",),
        "Times that draft tokens of a sequence were verified.",
        lambda model: model.total("drafts"),
    ),
    ScalarMetric(
        "spec_decode_num_draft_tokens",
        ("spec_decode_num_draft_tokens",),
        "Draft tokens verified.",
        lambda model: model.total("draft_tokens"),
    ),
    ScalarMetric(
        "spec_decode_num_accepted_tokens",
        ("spec_decode_num_accepted_tokens",),
        "Draft tokens accepted.",
        lambda model: model.total("accepted_tokens"),
    ),
    ScalarMetric("model_loads", (), "Times it was loaded.", lambda model: model.loads),
    ScalarMetric("engine_restarts", (), "Times the engine died and was started again.", lambda model: model.restarts),
    ScalarMetric(
        "requests_retried",
        (),
        "Requests in flight when the engine died that were given to the next one, each time.",
        lambda model: model.retried,
    ),
    ScalarMetric(
        "requests_charged",
        (),
        "Requests ended with an error because the engine died each time it worked on them.",
        lambda model: model.charged,
    ),
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
        "request_prefill_computed_tokens",
        ("request_prefill_kv_computed_tokens",),
        "Prompt tokens of a request that did not come from the cache.",
        lambda model: model.request_computed,
    ),
    HistogramMetric(
        "request_max_num_generation_tokens",
        ("request_max_num_generation_tokens",),
        "Tokens sampled for the longest sample of a request.",
        lambda model: model.request_longest_output,
    ),
    HistogramMetric(
        "request_generation_tokens",
        ("request_generation_tokens",),
        "Tokens sampled for a request.",
        lambda model: model.request_output,
    ),
    HistogramMetric(
        "request_params_max_tokens",
        ("request_params_max_tokens",),
        "max_tokens of a request.",
        lambda model: model.request_max_tokens,
    ),
    HistogramMetric("request_params_n", ("request_params_n",), "Samples of a request.", lambda m: m.request_samples),
    HistogramMetric("step_tokens", ("iteration_tokens_total",), "Tokens computed in a step.", lambda m: m.step_tokens),
]

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
    for gauge in GAUGES:
        for name, labels in _names(gauge):
            gauges = GaugeMetricFamily(name, gauge.help, labels=["model_name", *labels])
            for model_name, model in models.items():
                gauges.add_metric([model_name, *labels.values()], gauge.of(model))
            yield gauges
    for counter in COUNTERS:
        for name, labels in _names(counter):
            counters = CounterMetricFamily(name, counter.help, labels=["model_name", *labels])
            for model_name, model in models.items():
                counters.add_metric([model_name, *labels.values()], counter.of(model))
            yield counters
    for metric in HISTOGRAMS:
        for name, labels in _names(metric):
            histograms = HistogramMetricFamily(name, metric.help, labels=["model_name", *labels])
            for model_name, model in models.items():
                histogram = metric.of(model)
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


def _names(metric: ScalarMetric | HistogramMetric) -> Iterator[tuple[str, dict[str, str]]]:
    """Each name with its labels beside `model_name`."""
    yield f"quire_{metric.name}", {}
    for alias in metric.aliases:
        yield f"vllm:{alias}", {"engine": "0"}


def _cache_config(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    """Facts in labels, as in vLLM: routers read the size of a cache from them."""
    help_text, facts = "The size of the KV cache, in its labels.", ["block_size", "num_gpu_blocks"]
    ours = GaugeMetricFamily("quire_cache_config_info", help_text, labels=["model_name", *facts])
    theirs = GaugeMetricFamily("vllm:cache_config_info", help_text, labels=["model_name", "engine", *facts])
    for name, model in models.items():
        if model.now.num_blocks:
            values = [str(model.now.block_size), str(model.now.num_blocks)]
            ours.add_metric([name, *values], 1)
            theirs.add_metric([name, "0", *values], 1)
    yield ours
    yield theirs


GPU_GAUGES: list[tuple[str, str, Callable[[GPUReading], float | None]]] = [
    ("utilization_ratio", "Share of the last moment in which a kernel ran on the GPU.", lambda gpu: gpu.utilization),
    ("memory_used_bytes", "Memory of the GPU that is used, by all processes.", lambda gpu: gpu.memory_used),
    ("memory_total_bytes", "Memory of the GPU.", lambda gpu: gpu.memory_total),
    ("power_watts", "Power that the GPU draws.", lambda gpu: gpu.power),
    ("temperature_celsius", "Temperature of the GPU.", lambda gpu: gpu.temperature),
]


def _gpus(gpus: Sequence[GPUReading]) -> Iterator[Metric]:
    for name, help_text, value in GPU_GAUGES:
        family = GaugeMetricFamily(f"quire_gpu_{name}", help_text, labels=["gpu", "gpu_name"])
        for gpu in gpus:
            if (reading := value(gpu)) is not None:
                family.add_metric([str(gpu.number), gpu.name], reading)
        yield family


TIERS = {
    "hits": "Prompt tokens that came from a tier of the KV cache beyond its pool; also counted in prefix_cache_hits.",
    "seconds_saved": "Time that computing these tokens takes, less the time until they were there.",
    "read_bytes": "Bytes of blocks read from a tier.",
    "written_bytes": "Bytes of blocks written to a tier.",
    "errors": "Reads from a tier and writes to it that failed.",
}


def _tiers(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    counters = {
        name: CounterMetricFamily(f"quire_kv_tier_{name}", help_text, labels=["model_name", "tier"])
        for name, help_text in TIERS.items()
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


TRANSFERS = {
    "prefills": "Prompts that a decode engine has asked other engines to compute.",
    "failed": "Prompts of which not all blocks arrived: another engine computed the rest, or the one that asked.",
    "tokens": "Prompt tokens whose keys and values arrived from other engines.",
    "wait_seconds": "Time that requests waited for other engines to compute their prompts, and for the blocks.",
    "received_bytes": "Bytes of blocks that arrived from other engines.",
    "sent_bytes": "Bytes of blocks sent to other engines.",
}


def _transfers(models: dict[str, ModelMetrics]) -> Iterator[Metric]:
    counters = {
        name: CounterMetricFamily(f"quire_kv_transfer_{name}", help_text, labels=["model_name"])
        for name, help_text in TRANSFERS.items()
    }
    gauges = {
        name: GaugeMetricFamily(f"quire_kv_transfer_{name}", help_text, labels=["model_name"])
        for name, help_text in (
            ("in_flight", "Prompts that other engines compute now."),
            ("peers", "Connections between engines that hand over KV blocks."),
        )
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
    ours = CounterMetricFamily(f"quire_{name}", help_text, labels=["model_name", "position"])
    theirs = CounterMetricFamily(f"vllm:{name}", help_text, labels=["model_name", "engine", "position"])
    for model_name, model in models.items():
        for position, count in enumerate(model.accepted_at):
            ours.add_metric([model_name, str(position)], count)
            theirs.add_metric([model_name, "0", str(position)], count)
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
