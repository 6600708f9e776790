"""The cheapest configurations that keep limits on latency at a rate of requests.

Every combination of hardware, format, KV cache, devices and replicas is estimated by arithmetic (queueing.py); the
cheapest are then served on a virtual clock (fleet.py), and get more replicas where that shows that they need them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from quire.core.errors import BadRequest, QuireError
from quire.planning.fleet import EngineFlags, Fleet, plan_engine
from quire.planning.hardware import Hardware, usable_memory
from quire.planning.memory import EngineLimits, Load, plan_memory, sequence_bytes
from quire.planning.planned_model import PlannedModel
from quire.planning.queueing import Estimate, estimate
from quire.planning.slo import Slo
from quire.planning.step_times import RooflineTimes, default_costs, roofline_times
from quire.planning.summary import Summary, summarize
from quire.planning.workload import WorkloadSpec, generate

DEVICES = (1, 2, 4, 8)  # numbers of devices that share every matrix
FORMATS = {True: ("bfloat16", "fp8", "awq"), False: ("bfloat16", "q8_0", "q4_k_m")}  # by whether it is a GPU
KV_DTYPES = {True: ("bfloat16", "fp8"), False: ("float16", "int8")}
STEP_TOKENS = 512  # --max-num-batched-tokens, as `quire serve` has it
MAX_NUM_SEQS = 256
MAX_REPLICAS = 1000
SIMULATED_SECONDS, MIN_REQUESTS, MAX_REQUESTS = 20.0, 80, 200  # of traffic
MAX_SIMULATED_REPLICAS = 4  # of more, one stands for all
MAX_TRIES = 3  # of a configuration, each with more replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The load that is to be served."""

    rate: float  # requests a second
    prompt: int
    output: int
    slo: Slo

    def __post_init__(self) -> None:
        if not 0 < self.rate < inf:
            raise BadRequest(f"rate is {self.rate}", "it must be above 0, and finite", param="rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to serve it."""

    hardware: Hardware
    model: PlannedModel
    format: str
    kv_dtype: str
    tp: int
    replicas: int
    price: float  # of one device for an hour
    expected: Estimate  # of one replica
    why_not: str = ""  # what it misses; empty: nothing
    excess: float = 0.0  # how many times its limit what it misses is
    summary: Summary | None = None  # of its simulation

    @property
    def per_hour(self) -> float:
        return self.replicas * self.tp * self.price

    @property
    def order(self) -> tuple[float, int]:
        """The cheapest first; among equals, and where prices are not known, the one with the fewest devices."""
        return self.per_hour, self.replicas * self.tp

    def per_million(self, demand: Demand) -> float:
        """Dollars for a million tokens, of prompts and outputs together."""
        return self.per_hour / 3600 / (demand.rate * (demand.prompt + demand.output)) * 1e6


@dataclass(frozen=True, slots=True)
class SearchResult:
    feasible: list[Configuration]  # simulated, the cheapest first
    near_misses: list[Configuration]


Counted = Callable[[Hardware, str], PlannedModel]  # (hardware, format) -> the model as its backend keeps it


def search(
    demand: Demand, hardware: Sequence[Hardware], count_model: Counted, *, formats: Sequence[str] | None = None,
    kv_dtype: str | None = None, tp: int | None = None, price: float | None = None, num_results: int = 4,
) -> SearchResult:  # fmt: skip
    """None: all that are worth a try. `formats` of one empty name: the model has files."""
    candidates: list[Configuration] = []
    for device in hardware:
        for format_name in formats or FORMATS[device.is_gpu]:
            model = count_model(device, format_name)
            _check_length(demand, model)
            for dtype in [kv_dtype] if kv_dtype else _kv_dtypes(model, device):
                for devices in [tp] if tp else DEVICES if device.link else (1,):
                    paid = device.price if price is None else price
                    candidates.append(_configure(demand, device, model, format_name, dtype, devices, paid))
    possible = sorted((one for one in candidates if not one.why_not), key=lambda one: one.order)
    feasible, missed = _confirm(demand, _cheapest_of_each(possible), num_results)
    served = {one.hardware.name for one in [*possible, *feasible]} - {one.hardware.name for one in missed}
    failed = [one for one in [*missed, *candidates] if one.why_not and one.hardware.name not in served]
    return SearchResult(feasible, _near_misses(failed))


def _check_length(demand: Demand, model: PlannedModel) -> None:
    if demand.prompt + demand.output > (most := model.config.max_length):
        raise BadRequest(
            f"a prompt of {demand.prompt:,} and an output of {demand.output:,} tokens, and {model.name} has {most:,} "
            "positions",
            "give a shorter prompt or output",
            param="prompt",
        )


def _kv_dtypes(model: PlannedModel, hardware: Hardware) -> Iterable[str]:
    kinds = KV_DTYPES[hardware.is_gpu]
    return kinds[:1] if model.config.latent and not hardware.is_gpu else kinds


def _configure(
    demand: Demand, hardware: Hardware, model: PlannedModel, format_name: str, kv_dtype: str, tp: int, price: float
) -> Configuration:
    """With as many replicas as the estimate asks for."""
    times = roofline_times(model, kv_dtype, hardware, tp=tp, eight_bit=not hardware.is_gpu)
    room = _max_seqs(demand, hardware, model, kv_dtype, tp)
    found = Configuration(
        hardware=hardware, model=model, format=format_name, kv_dtype=kv_dtype, tp=tp, replicas=1, price=price,
        expected=_estimate(demand, times, hardware, room, demand.rate),
    )  # fmt: skip
    if room < 1:
        share = model.weight_bytes / tp / hardware.memory
        why = f"weights take {share:.0%} of each device: no sequence fits beside them"
        return replace(found, why_not=why, excess=share)
    alone = _estimate(demand, times, hardware, room, 1e-3)
    if misses := demand.slo.misses(alone.p99(demand.output)):
        excess = demand.slo.excess(alone.p99(demand.output))
        return replace(found, expected=alone, why_not=f"even without load: {'; '.join(misses)}", excess=excess)
    replicas = _replicas(demand, times, hardware, room)
    if replicas is None:
        return replace(found, replicas=MAX_REPLICAS, expected=alone, why_not=f"more than {MAX_REPLICAS} replicas")
    return replace(found, replicas=replicas, expected=_estimate(demand, times, hardware, room, demand.rate / replicas))


def _max_seqs(demand: Demand, hardware: Hardware, model: PlannedModel, kv_dtype: str, tp: int) -> int:
    """Sequences that fit beside the weights."""
    kv = model.kv_spec(kv_dtype)
    limits = EngineLimits(max_num_batched_tokens=STEP_TOKENS, threads=hardware.threads)
    load = Load(context=demand.prompt + demand.output, prompt=demand.prompt, output=demand.output)
    memory = plan_memory(model, kv, load, limits=limits, on_gpu=hardware.is_gpu, process=hardware.process_bytes)
    beside = memory.total - memory.kv_cache + (tp - 1) * (memory.process + memory.activations)
    room = usable_memory(hardware, tp) - beside
    return min(MAX_NUM_SEQS, room // sequence_bytes(model, kv, load.context)) if room > 0 else 0


def _estimate(demand: Demand, times: RooflineTimes, hardware: Hardware, max_seqs: int, rate: float) -> Estimate:
    return estimate(times, rate, demand.prompt, demand.output, max_seqs, STEP_TOKENS)


def _replicas(demand: Demand, times: RooflineTimes, hardware: Hardware, max_seqs: int) -> int | None:
    """The fewest that keep the limits, by bisection; None: more than MAX_REPLICAS."""

    def keeps(count: int) -> bool:
        expected = _estimate(demand, times, hardware, max_seqs, demand.rate / count)
        return not demand.slo.misses(expected.p99(demand.output))

    if not keeps(MAX_REPLICAS):
        return None
    low, high = 0, MAX_REPLICAS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


def _cheapest_of_each(ordered: Iterable[Configuration]) -> list[Configuration]:
    """The best KV cache and number of devices of every hardware and format."""
    kept: dict[tuple[str, str], Configuration] = {}
    for one in ordered:
        kept.setdefault((one.hardware.name, one.format), one)
    return list(kept.values())


def _confirm(
    demand: Demand, ordered: list[Configuration], num_results: int
) -> tuple[list[Configuration], list[Configuration]]:
    """-> those that keep the limits when simulated, the cheapest first, and those that do not."""
    feasible: list[Configuration] = []
    missed: list[Configuration] = []
    for one in ordered:
        if len(feasible) >= num_results:
            break
        shown = _simulate_until_kept(demand, one)
        (missed if shown.why_not else feasible).append(shown)
    return sorted(feasible, key=lambda one: one.order), missed


def _simulate_until_kept(demand: Demand, configuration: Configuration) -> Configuration:
    """With half as many replicas more, and again, until the limits are kept."""
    shown = _simulated(demand, configuration)
    for _ in range(MAX_TRIES - 1):
        if not shown.why_not:
            break
        shown = _simulated(demand, replace(configuration, replicas=ceil(1.5 * shown.replicas)))
    return shown


def _simulated(demand: Demand, configuration: Configuration) -> Configuration:
    hardware, replicas = configuration.hardware, configuration.replicas
    served = replicas if replicas <= MAX_SIMULATED_REPLICAS else 1
    rate = demand.rate * served / replicas
    spec = WorkloadSpec(
        rate=rate, num_requests=min(MAX_REQUESTS, max(MIN_REQUESTS, ceil(rate * SIMULATED_SECONDS))),
        prompt=demand.prompt, output=demand.output, spread=0.3,
    )  # fmt: skip
    times = roofline_times(
        configuration.model, configuration.kv_dtype, hardware, tp=configuration.tp, eight_bit=not hardware.is_gpu
    )
    flags = EngineFlags(
        kv_cache_dtype=configuration.kv_dtype, max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
    )  # fmt: skip
    try:
        engine = plan_engine(configuration.model, hardware, flags, tp=configuration.tp)
        fleet = Fleet(engine, times, default_costs(hardware), num_replicas=served)
        summary = summarize(fleet.serve(generate(spec)))
    except QuireError as refusal:
        return replace(configuration, why_not=str(refusal))
    p99 = {"ttft": summary.ttft[99], "tpot": summary.tpot[99], "e2e": summary.latency[99]}
    why = "; ".join(demand.slo.misses(p99))
    return replace(configuration, summary=summary, why_not=why, excess=demand.slo.excess(p99) if why else 0.0)


def _near_misses(failed: list[Configuration], count: int = 5) -> list[Configuration]:
    """For each hardware that cannot serve the load, the configuration that misses it least."""
    nearest: dict[str, Configuration] = {}
    for one in sorted(failed, key=lambda one: one.excess):
        nearest.setdefault(one.hardware.name, one)
    return list(nearest.values())[:count]
