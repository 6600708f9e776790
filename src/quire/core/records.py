"""What happened: the numbers that metrics, logs, benchmarks and the planner all read."""

from dataclasses import dataclass, field

from quire.core.request import FinishReason


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler after a step. Counters only grow."""

    running: int = 0
    waiting: int = 0
    num_blocks: int = 0
    held_blocks: int = 0  # in some sequence's table
    cached_blocks: int = 0  # free, and still carrying a prefix
    held_slots: int = 0  # held_blocks * block_size
    used_slots: int = 0  # of those, the ones a token occupies; waste = 1 - used / held
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # prompt tokens found
    drafts: int = 0  # times that guesses at a sequence's next tokens were computed
    draft_tokens: int = 0  # the guesses
    accepted_tokens: int = 0  # of those, the ones that were drawn
    accepted_at: list[int] = field(default_factory=list)  # the same by place: first guesses, second ones, ...


@dataclass(slots=True, kw_only=True)
class StepRecord:
    step: int
    num_tokens: int  # computed in this step
    num_drawn: int  # tokens the sequences gained
    num_drafts: int = 0  # of the tokens computed, guesses
    schedule_seconds: float
    run_seconds: float
    update_seconds: float
    scheduler: SchedulerStats
    admitted: list[str] = field(default_factory=list)  # ids of requests that were in no step before, or were preempted

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
    max_tokens: int | None
    arrival: float
    admitted: float | None = None  # to the first step that computed some of it
    first_token: float | None
    last_token: float | None
    finished: float

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
