"""Where a step is carried out."""

from dataclasses import dataclass
from typing import Protocol

from quire.core.plan import StepOutput, StepPlan
from quire.core.seq2seq import Seq2Seq
from quire.runtime.guides import Matchers


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor has room for, known once it has started."""

    num_blocks: int
    num_host_blocks: int
    vocab_size: int
    max_model_len: int  # as resolved: never more than the model or the cache allows
    weight_bytes: int
    cache_bytes: int
    ahead: int = 0  # plans it takes beyond the one whose output is awaited
    seq2seq: Seq2Seq | None = None  # of a model that reads sources
    window: int = 0  # tokens that its layers look back, if all do no further; 0: they see everything


class Executor(Protocol):
    def start(self) -> Capacity: ...

    def guide(self, matchers: Matchers) -> None:
        """Once it has started: how answers are held to a language that is asked for."""

    def submit(self, plan: StepPlan) -> None:
        """Begin with a step, or do it."""

    def collect(self) -> StepOutput:
        """Wait for the oldest step submitted and not collected."""

    def stop(self) -> None: ...
