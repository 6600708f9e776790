"""What Prometheus reads. The records are added up as they come; their text is made when it is asked for."""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire import __version__
from quire.core.records import RequestRecord, SchedulerStats, StepRecord
from quire.server.histogram import Histogram

_SECONDS = [m * 10.0**e for e in range(-3, 2) for m in (1, 2.5, 5)] + [100.0, 250.0, 600.0]  # 1 ms .. 10 min
_SHORT = [0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, *_SECONDS[:13]]  # 10 us .. 10 s: parts of a step
_TOKENS = [float(2**power) for power in range(21)]  # 1 .. 1 Mi

_PHASES = ("schedule", "run", "update")


class Metrics(Collector):
    """An `Observer` of the service, and the counter of HTTP requests."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._now = SchedulerStats()  # of the engine that runs now
        self._past: Counter[str] = Counter()  # counters of engines that died
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._restarts = 0
        self._finished: Counter[str] = Counter()  # by reason
        self._http: Counter[tuple[str, str]] = Counter()  # by route and status
        self._first_token = Histogram(_SECONDS)
        self._next_token = Histogram(_SECONDS)
        self._per_token = Histogram(_SECONDS)
        self._whole = Histogram(_SECONDS)
        self._request_prompt = Histogram(_TOKENS)
        self._request_output = Histogram(_TOKENS)
        self._step_seconds = {phase: Histogram(_SHORT) for phase in _PHASES}
        self._step_tokens = Histogram(_TOKENS)

    def step(self, record: StepRecord) -> None:
        self._now = record.scheduler
        self._prompt_tokens += record.num_prompt_tokens
        self._generation_tokens += record.num_drawn
        self._step_tokens.observe(record.num_tokens)
        self._step_seconds["schedule"].observe(record.schedule_seconds)
        self._step_seconds["run"].observe(record.run_seconds)
        self._step_seconds["update"].observe(record.update_seconds)

    def token(self, seconds: float, count: int) -> None:
        if count:
            self._next_token.observe(seconds / count, count)

    def request(self, record: RequestRecord) -> None:
        self._finished[record.finish_reason] += 1
        self._whole.observe(record.finished - record.arrival)
        self._request_prompt.observe(record.num_prompt_tokens)
        self._request_output.observe(record.num_output_tokens)
        if record.ttft is not None:
            self._first_token.observe(record.ttft)
        if record.tpot is not None:
            self._per_token.observe(record.tpot)

    def restarted(self) -> None:
        for name in ("preemptions", "prefix_queries", "prefix_hits"):
            self._past[name] += getattr(self._now, name)
        self._now = SchedulerStats()
        self._restarts += 1

    def http(self, route: str, status: int) -> None:
        self._http[route, str(status)] += 1

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        now = self._now
        build = GaugeMetricFamily("quire_build_info", "The version that runs.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        usage = now.held_blocks / now.num_blocks if now.num_blocks else 0.0
        waste = 1.0 - now.used_slots / now.held_slots if now.held_slots else 0.0
        for name, help_text, value in (
            ("num_requests_running", "Sequences that take part in steps.", now.running),
            ("num_requests_waiting", "Sequences that wait to be admitted.", now.waiting),
            ("kv_cache_usage_ratio", "Blocks of the KV cache held by sequences, of all blocks.", usage),
            (
                "kv_cache_waste_ratio",
                "Slots of held blocks that no token occupies, of all slots of held blocks.",
                waste,
            ),
            ("kv_cache_blocks", "Blocks of the KV cache.", now.num_blocks),
            ("kv_cache_cached_blocks", "Free blocks that still carry a reusable prefix.", now.cached_blocks),
        ):
            yield GaugeMetricFamily(f"quire_{name}", help_text, value)

    def _counters(self) -> Iterator[Metric]:
        past, now = self._past, self._now
        for name, help_text, value in (
            ("prompt_tokens", "Prompt tokens computed; those found in the cache are not.", self._prompt_tokens),
            ("generation_tokens", "Tokens drawn.", self._generation_tokens),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the cache.",
                past["prefix_queries"] + now.prefix_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", past["prefix_hits"] + now.prefix_hits),
            ("preemptions", "Sequences put back to make room.", past["preemptions"] + now.preemptions),
            ("engine_restarts", "Times the engine died and was started again.", self._restarts),
        ):
            yield CounterMetricFamily(f"quire_{name}", help_text, value)
        ended = CounterMetricFamily(
            "quire_request_success", "Requests that ended, by reason.", labels=["finished_reason"]
        )
        for reason, count in self._finished.items():
            ended.add_metric([reason], count)
        yield ended
        http = CounterMetricFamily(
            "quire_http_requests", "HTTP requests, by route and status.", labels=["route", "status"]
        )
        for labels, count in self._http.items():
            http.add_metric(labels, count)
        yield http

    def _histograms(self) -> Iterable[Metric]:
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self._first_token),
            ("inter_token_latency_seconds", "Between a sample's tokens.", self._next_token),
            ("time_per_output_token_seconds", "Mean of a request, after its first token.", self._per_token),
            ("e2e_request_latency_seconds", "From arrival to the end.", self._whole),
            ("request_prompt_tokens", "Prompt tokens of a request.", self._request_prompt),
            ("request_generation_tokens", "Tokens drawn for a request.", self._request_output),
            ("step_tokens", "Tokens computed in a step.", self._step_tokens),
        ):
            yield HistogramMetricFamily(f"quire_{name}", help_text, histogram.buckets(), histogram.sum)
        steps = HistogramMetricFamily("quire_step_seconds", "Time of a step, by phase.", labels=["phase"])
        for phase, histogram in self._step_seconds.items():
            steps.add_metric([phase], histogram.buckets(), histogram.sum)
        yield steps
