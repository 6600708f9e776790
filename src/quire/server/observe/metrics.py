"""Counters and histograms of the records of the engine. exposition.py makes their text."""

from collections import Counter
from collections.abc import Callable
from itertools import zip_longest

from quire.client.service import TokenGap
from quire.core.records import RequestRecord, SchedulerStats, StepRecord, merged
from quire.server.observe.histogram import Histogram
from quire.server.observe.recent import Recent

_SECONDS = [m * 10.0**e for e in range(-3, 2) for m in (1, 2.5, 5)] + [100.0, 250.0, 600.0]  # 1 ms .. 10 min
_SHORT = [0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, *_SECONDS[:13]]  # 10 us .. 10 s: parts of a step
_TOKENS = [float(2**power) for power in range(21)]  # 1 .. 1 Mi
_SAMPLES = [1.0, 2.0, 5.0, 10.0, 20.0]


SCHEDULER_COUNTERS = (
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
)
TRANSFER_COUNTERS = ("prefills", "failed", "tokens", "wait_seconds", "received_bytes", "sent_bytes")
TIER_COUNTERS = ("hits", "seconds_saved", "read_bytes", "written_bytes", "errors", "skipped_blocks")


class ModelMetrics:
    """An `Observer` of one model. A call costs a microsecond or two."""

    def __init__(self) -> None:
        self._now: dict[int, SchedulerStats] = {}  # of the running engines, by number
        self.past: Counter[str] = Counter()  # counters of engines that ended
        self._past_accepted_at: list[int] = []
        self._past_tiers: dict[tuple[str, str], float] = {}  # by tier and counter
        self._past_transfers: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.restarts = 0
        self.retried = 0  # requests, counted each time
        self.charged = 0  # requests that the engine died of
        self.is_loaded = False
        self.num_ready: Callable[[], int] = lambda: int(self.is_loaded)  # engines that take requests
        self.loads = 0
        self.finished: Counter[str] = Counter()  # by reason
        self.recent = Recent()
        self.first_token = Histogram(_SECONDS)
        self.next_token = Histogram(_SECONDS)
        self.per_token = Histogram(_SECONDS)
        self.queue = Histogram(_SECONDS)
        self.prefill = Histogram(_SECONDS)
        self.inference = Histogram(_SECONDS)
        self.decode = Histogram(_SECONDS)
        self.whole = Histogram(_SECONDS)
        self.request_prompt = Histogram(_TOKENS)
        self.request_computed = Histogram(_TOKENS)
        self.request_output = Histogram(_TOKENS)
        self.request_longest_output = Histogram(_TOKENS)
        self.request_max_tokens = Histogram(_TOKENS)
        self.request_samples = Histogram(_SAMPLES)
        self.step_tokens = Histogram(_TOKENS)
        self.step_seconds = {phase: Histogram(_SHORT) for phase in ("schedule", "run", "update")}

    @property
    def now(self) -> SchedulerStats:
        """The statistics of all running engines, now."""
        return merged(list(self._now.values()))

    def engine(self, number: int) -> "EngineMetrics":
        """The observer of one engine of several."""
        return EngineMetrics(self, number)

    def step(self, record: StepRecord, engine: int = 0) -> None:
        self._now[engine] = record.scheduler
        self.generation_tokens += record.num_drawn
        self.step_tokens.observe(record.num_tokens)
        self.step_seconds["schedule"].observe(record.schedule_seconds)
        self.step_seconds["run"].observe(record.run_seconds)
        self.step_seconds["update"].observe(record.update_seconds)

    def rests(self, scheduler: SchedulerStats, engine: int = 0) -> None:
        self._now[engine] = scheduler

    def tokens(self, gaps: list[TokenGap]) -> None:
        for seconds, count in gaps:
            if count:
                self.next_token.observe(seconds / count, count)
        self.recent.tokens([seconds / count for seconds, count in gaps if count])

    def request(self, record: RequestRecord) -> None:
        self.recent.request(record)
        self.finished[record.finish_reason] += 1
        self.whole.observe(record.finished - record.arrival)
        self.prompt_tokens += record.num_prompt_tokens
        self.cached_tokens += record.num_cached_tokens
        self.request_prompt.observe(record.num_prompt_tokens)
        self.request_computed.observe(record.num_prompt_tokens - record.num_cached_tokens)
        self.request_output.observe(record.num_output_tokens)
        self.request_longest_output.observe(record.longest_output)
        self.request_samples.observe(record.num_samples)
        if record.max_tokens is not None:
            self.request_max_tokens.observe(record.max_tokens)
        if record.ttft is not None:
            self.first_token.observe(record.ttft)
        if record.tpot is not None:
            self.per_token.observe(record.tpot)
        if record.admitted is not None:
            self.queue.observe(record.admitted - record.arrival)
            if record.first_token is not None:
                self.prefill.observe(record.first_token - record.admitted)
            if record.last_token is not None:
                self.inference.observe(record.last_token - record.admitted)
        if record.first_token is not None and record.last_token is not None:
            self.decode.observe(record.last_token - record.first_token)

    def restarted(self, num_retried: int = 0, num_charged: int = 0, engine: int = 0) -> None:
        self.restarts += 1
        self.retried += num_retried
        self.charged += num_charged
        self._engine_ended(engine)

    def _engine_ended(self, engine: int) -> None:
        last = self._now.pop(engine, SchedulerStats())
        for name in SCHEDULER_COUNTERS:
            self.past[name] += getattr(last, name)
        for name in TRANSFER_COUNTERS:
            self._past_transfers[name] += getattr(last.transfers, name, 0)
        self._past_accepted_at = _added(self._past_accepted_at, last.accepted_at)
        for tier, stats in last.tiers.items():
            for name in TIER_COUNTERS:
                self._past_tiers[tier, name] = self._past_tiers.get((tier, name), 0) + getattr(stats, name)

    def loaded(self) -> None:
        self.is_loaded = True
        self.loads += 1

    def unloaded(self) -> None:
        """The engine was stopped on purpose."""
        for engine in list(self._now):
            self._engine_ended(engine)
        self.is_loaded = False

    def total(self, name: str) -> int:
        """A counter of the scheduler, over all engines so far."""
        return self.past[name] + int(getattr(self.now, name))

    @property
    def tier_counters(self) -> list[tuple[str, str]]:
        """Tier and name of the counters of the KV cache beyond the pool."""
        tiers = {tier: None for tier, _ in self._past_tiers} | dict.fromkeys(self.now.tiers)
        return [(tier, name) for tier in tiers for name in TIER_COUNTERS]

    def tier_total(self, tier: str, name: str) -> float:
        """Over all engines so far."""
        now = getattr(self.now.tiers[tier], name) if tier in self.now.tiers else 0
        return float(self._past_tiers.get((tier, name), 0) + now)

    @property
    def accepted_at(self) -> list[int]:
        """Accepted draft tokens by position, over all engines so far."""
        return _added(self._past_accepted_at, self.now.accepted_at)

    def transfer_total(self, name: str) -> float:
        """A counter of KV blocks between engines, over all engines so far."""
        return float(self._past_transfers[name] + getattr(self.now.transfers, name, 0))

    @property
    def has_transfers(self) -> bool:
        return bool(self._past_transfers) or self.now.transfers is not None


class EngineMetrics:
    """An `Observer` of one engine of a model that has several."""

    def __init__(self, model: ModelMetrics, number: int) -> None:
        self._model, self._number = model, number
        self.tokens, self.request = model.tokens, model.request
        self.loaded, self.unloaded = model.loaded, model.unloaded

    def step(self, record: StepRecord) -> None:
        self._model.step(record, self._number)

    def rests(self, scheduler: SchedulerStats) -> None:
        self._model.rests(scheduler, self._number)

    def restarted(self, num_retried: int = 0, num_charged: int = 0) -> None:
        self._model.restarted(num_retried, num_charged, self._number)


def _added(one: list[int], other: list[int]) -> list[int]:
    return [sum(pair) for pair in zip_longest(one, other, fillvalue=0)]


class Metrics:
    """Metrics of the models and of the HTTP requests."""

    def __init__(self) -> None:
        self.models: dict[str, ModelMetrics] = {}  # by name
        self.http_requests: Counter[tuple[str, str]] = Counter()  # by route and status
        self.errors: Counter[str] = Counter()  # by code
        self.tenant_tokens: Counter[tuple[str, str]] = Counter()  # by tenant and kind (prompt, output)

    def of(self, model: str) -> ModelMetrics:
        return self.models.setdefault(model, ModelMetrics())

    def http(self, route: str, status: int, error: str = "") -> None:
        self.http_requests[route, str(status)] += 1
        if error:
            self.errors[error] += 1

    def tenant(self, name: str, prompt_tokens: int, output_tokens: int) -> None:
        self.tenant_tokens[name, "prompt"] += prompt_tokens
        self.tenant_tokens[name, "output"] += output_tokens
