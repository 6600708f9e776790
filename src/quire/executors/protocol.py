"""Where steps are computed: one device in this process, and later several."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire.core.draft_policy import DraftPolicy
from quire.core.plan import StepOutput, StepPlan
from quire.core.seq2seq import Seq2Seq

if TYPE_CHECKING:  # the server's process knows capacities, and imports nothing that computes
    from quire.runtime.adapters import LoadedAdapter
    from quire.runtime.disk_tier import DiskTier
    from quire.runtime.kv import KVSize
    from quire.runtime.kv_transfer.consumer import KVConsumer
    from quire.runtime.kv_transfer.producer import KVProducer
    from quire.runtime.structured_output import MatcherFactory


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor has room for, known once its KV cache is allocated."""

    num_blocks: int
    num_host_blocks: int
    vocab_size: int
    max_model_len: int  # as resolved: never more than the model or the cache allows
    weight_bytes: int
    cache_bytes: int
    ahead: int = 0  # plans it takes beyond the one whose output is awaited
    micro_batches: int = 1  # plans in flight of a pipeline: each is of other sequences
    seq2seq: Seq2Seq | None = None  # of an encoder-decoder
    drafts: DraftPolicy | None = None  # how draft tokens are chosen; None: its outputs have none
    max_draft_tokens: int = 0  # of a step without prompts, beside max_num_batched_tokens
    has_states: bool = False  # whether layers of the model have states, in the blocks or in slots
    num_slots: int = 0  # state slots
    num_host_slots: int = 0  # to swap states to
    num_checkpoint_slots: int = 0  # of checkpoints that are smaller than states; 0: they are in state slots
    small_host_slots: bool = False  # whether host slots are of these
    state_bytes: int = 0  # of all slots of the device
    host_slot_bytes: int = 0
    num_pages: int = 0  # window pages; 0: blocks have all layers
    page_window: int = 0  # the largest sliding window of the layers in window pages
    page_bytes: int = 0  # of a window page
    offload: bool = False  # whether host blocks keep prefixes
    window: int = 0  # the largest sliding window if every layer has one; 0: some layer attends to everything

    @property
    def block_bytes(self) -> int:
        beside = self.state_bytes + self.num_pages * self.page_bytes
        return (self.cache_bytes - beside) // self.num_blocks


class Executor(Protocol):
    """Starts in two phases, so that several of them can agree on the smallest KV cache that all have room for."""

    @property
    def store(self) -> "DiskTier | None":
        """Prefix blocks on disk."""

    @property
    def transfer(self) -> "KVProducer | KVConsumer | None":
        """KV blocks to or from other engines."""

    def load(self) -> "KVSize":
        """Load the weights. -> the largest KV cache that fits beside them"""

    def allocate(self, size: "KVSize") -> Capacity:
        """Allocate the KV cache, as large as `load` said or smaller, and be ready for plans."""

    def set_matcher_factory(self, new_matcher: "MatcherFactory") -> None:
        """How rows with structured output get their matcher."""

    def load_adapter(self, path: Path) -> "LoadedAdapter":
        """Read an adapter and make it ready for `add_adapter`, in any thread. Raises if it does not fit the model."""

    def add_adapter(self, key: str, loaded: "LoadedAdapter") -> None:
        """From now on, plans may name it."""

    def remove_adapter(self, key: str) -> None:
        """No later plan names it."""

    def submit(self, plan: StepPlan) -> None:
        """Begin a step, or compute it."""

    def collect(self) -> StepOutput:
        """Wait for the oldest step submitted and not collected."""

    def stop(self) -> None: ...
