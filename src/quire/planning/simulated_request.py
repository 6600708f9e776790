"""A request of a simulation, and when its tokens came."""

from dataclasses import dataclass, field
from functools import lru_cache

from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.planning.prompt_ids import simulated_tokens
from quire.planning.workload import Arrival

_OUTPUT_IDS = 1 << 48  # first of the token ids that outputs have: no prompt has them
_REQUEST_IDS = 1 << 24  # ids of one request's output; more than a context holds


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Times in seconds since the beginning."""

    number: int
    asked: Arrival
    replica: int = 0
    first_token: float = 0.0
    finished: float = 0.0
    num_cached: int = 0
    has_begun: bool = False  # its first token was sampled: its client may not have it yet
    token: int = field(init=False)  # every one of its output, as in `simulated_tokens`

    def __post_init__(self) -> None:
        self.token = _OUTPUT_IDS + self.number * _REQUEST_IDS

    @property
    def arrival(self) -> float:
        return self.asked.time

    @property
    def num_prompt(self) -> int:
        return len(self.asked.prompt_ids)

    @property
    def num_output(self) -> int:
        return self.asked.output

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float:
        return (self.finished - self.first_token) / max(1, self.num_output - 1)

    @property
    def latency(self) -> float:
        return self.finished - self.arrival

    @property
    def output_ids(self) -> range:
        return range(self.token, self.token + self.num_output)

    def as_request(self) -> Request:
        return Request(
            id=str(self.number), prompt_ids=simulated_tokens(self.asked.prompt_ids), params=_params(self.num_output),
            arrival=self.arrival, priority=self.asked.priority,
        )  # fmt: skip


@lru_cache(4096)
def _params(num_output: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_output, ignore_eos=True)
