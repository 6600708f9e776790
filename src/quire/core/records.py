"""Records of steps and requests: metrics, logs, benchmarks and the live page all read these numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from quire.core.request import DraftUsage, FinishReason


@dataclass(slots=True, kw_only=True)
class TierStats:
    """The KV cache beyond the pool: one tier. Counters only grow, but for `stored_bytes`."""

    hits: int = 0  # prompt tokens that came from it, also counted in prefix_hits
    seconds_saved: float = 0.0  # that computing these tokens takes, less the time until they were there
    read_bytes: int = 0
    written_bytes: int = 0
    stored_bytes: int = 0  # in it now
    errors: int = 0  # reads and writes that failed
    skipped_blocks: int = 0  # that were not written: the writer was behind until they were evicted, or the disk failed


@dataclass(slots=True, kw_only=True)
class TransferStats:
    """KV blocks between engines. Counters only grow, but for `in_flight` and `peers`."""

    prefills: int = 0  # asked of other engines
    failed: int = 0  # of these, ended before all blocks had arrived
    tokens: int = 0  # whose keys and values arrived
    wait_seconds: float = 0.0  # seconds that sequences waited for the tier's blocks
    received_bytes: int = 0
    sent_bytes: int = 0
    in_flight: int = 0  # prefills whose host blocks are held
    peers: int = 0  # engines that are connected


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler after a step. Counters only grow."""

    running: int = 0
    waiting: int = 0
    num_blocks: int = 0
    block_size: int = 0
    held_blocks: int = 0  # in the block table of a sequence
    cached_blocks: int = 0  # free, and still holding a prefix
    held_slots: int = 0  # held_blocks * block_size
    used_slots: int = 0  # held slots that a token occupies; waste = 1 - used_slots / held_slots
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache
    prefix_hits: int = 0  # prompt tokens that were in it
    tiers: dict[str, TierStats] = field(default_factory=dict)  # "host", "disk": where the prefix cache goes on
    transfers: TransferStats | None = None  # with other engines, where there are any
    drafts: int = 0  # runs with draft tokens
    draft_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # draft tokens that were accepted
    accepted_at: list[int] = field(default_factory=list)  # accepted draft tokens by position in the draft


def merged(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """The statistics of several engines as if these were one."""
    if len(stats) == 1:
        return stats[0]
    total = SchedulerStats()
    for each in stats:
        for spec in fields(SchedulerStats):
            setattr(total, spec.name, _sum(getattr(total, spec.name), getattr(each, spec.name)))
    total.block_size = max((each.block_size for each in stats), default=0)
    return total


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict):
        return {key: _sum(one.get(key), other.get(key)) for key in (*one, *(key for key in other if key not in one))}
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    if isinstance(one, TierStats | TransferStats):
        return type(one)(**{spec.name: getattr(one, spec.name) + getattr(other, spec.name) for spec in fields(one)})
    return one + other


@dataclass(slots=True, kw_only=True)
class StepRecord:
    step: int
    num_tokens: int  # computed in this step
    num_drawn: int  # tokens that the sequences gained
    num_drafts: int = 0  # of num_tokens, draft tokens
    schedule_seconds: float
    run_seconds: float
    update_seconds: float
    scheduler: SchedulerStats
    admitted: list[str] = field(default_factory=list)  # ids of requests that took a row, also after a preemption

    @property
    def seconds(self) -> float:
        return self.schedule_seconds + self.run_seconds + self.update_seconds


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One finished request. Times are time.monotonic()."""

    id: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_samples: int
    longest_output: int = 0  # tokens of its longest sample
    max_tokens: int | None
    arrival: float
    admitted: float | None = None  # to its first step
    first_token: float | None
    last_token: float | None
    finished: float
    drafts: DraftUsage = field(default_factory=DraftUsage)

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first."""
        per_sample = self.num_output_tokens / self.num_samples
        if self.first_token is None or self.last_token is None or per_sample <= 1:
            return None
        return (self.last_token - self.first_token) / (per_sample - 1)
