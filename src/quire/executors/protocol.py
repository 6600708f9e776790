"""Where a step is carried out."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire.core.plan import StepOutput, StepPlan
from quire.core.seq2seq import Seq2Seq

if TYPE_CHECKING:  # the server's process knows what executors have room for, and runs nothing
    from quire.runtime.adapters import LoadedAdapter
    from quire.runtime.structured_output import Matchers


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
    drafts: bool = False  # whether its outputs come with guesses at what follows
    window: int = 0  # tokens that its layers look back, if all do no further; 0: they see everything


class Executor(Protocol):
    def start(self) -> Capacity: ...

    def guide(self, matchers: "Matchers") -> None:
        """Once it has started: how answers are held to a language that is asked for."""

    def load_adapter(self, path: Path) -> "LoadedAdapter":
        """Read one and make it ready for `add_adapter`; in any thread. Raises if it cannot be one of the model."""

    def add_adapter(self, key: str, loaded: "LoadedAdapter") -> None:
        """From now on, plans may ask for it."""

    def remove_adapter(self, key: str) -> None:
        """No plan will ask for it any more."""

    def submit(self, plan: StepPlan) -> None:
        """Begin with a step, or do it."""

    def collect(self) -> StepOutput:
        """Wait for the oldest step submitted and not collected."""

    def stop(self) -> None: ...
