"""Percentiles of a simulation, as benchmarks of real servers report them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.planning.percentiles import percentile
from quire.planning.simulated_request import SimulatedRequest
from quire.planning.simulator import Simulation

PERCENTILES = (50, 90, 99)
MEASURES: dict[str, Callable[[SimulatedRequest], float]] = {  # by the names of vLLM's --goodput
    "ttft": lambda request: request.ttft,
    "tpot": lambda request: request.tpot,
    "e2el": lambda request: request.latency,
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds and tokens a second."""

    num_requests: int
    seconds: float
    ttft: dict[int, float]
    tpot: dict[int, float]
    latency: dict[int, float]
    output_tokens_per_second: float
    total_tokens_per_second: float
    hit_rate: float  # share of prompt tokens that came from the prefix cache
    utilization: float  # share of the time that devices computed
    preemptions: int
    mean_queue: float  # sequences that wait, of all replicas
    max_queue: int  # of one replica
    requests_per_second: float
    num_steps: int
    goodput: float | None = None  # requests a second that keep the bounds, if there are any

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def summarize(simulation: Simulation, goals: Mapping[str, float] | None = None) -> Summary:
    """`goals`: seconds that a request may take, by the names of MEASURES."""
    requests, replicas, seconds = simulation.requests, simulation.replicas, simulation.seconds
    num_output = sum(request.num_output for request in requests)
    num_prompt = sum(request.num_prompt for request in requests)
    cached = sum(request.num_cached for request in requests)

    def spread(values: list[float]) -> dict[int, float]:
        return {share: percentile(values, share) for share in PERCENTILES}

    return Summary(
        num_requests=len(requests),
        seconds=seconds,
        ttft=spread([request.ttft for request in requests]),
        tpot=spread([request.tpot for request in requests if request.num_output > 1] or [0.0]),
        latency=spread([request.latency for request in requests]),
        output_tokens_per_second=num_output / seconds,
        total_tokens_per_second=(num_output + num_prompt) / seconds,
        hit_rate=cached / num_prompt,
        utilization=sum(replica.busy_seconds for replica in replicas) / (seconds * len(replicas)),
        preemptions=sum(replica.scheduler.num_preemptions for replica in replicas),
        mean_queue=sum(replica.queue_seconds for replica in replicas) / seconds,
        max_queue=max(replica.max_queue for replica in replicas),
        requests_per_second=len(requests) / seconds,
        num_steps=sum(replica.num_steps for replica in replicas),
        goodput=sum(_keeps(request, goals) for request in requests) / seconds if goals else None,
    )


def _keeps(request: SimulatedRequest, goals: Mapping[str, float]) -> bool:
    return all(MEASURES[name](request) <= most for name, most in goals.items())
