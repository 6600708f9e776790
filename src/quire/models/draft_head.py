"""Heads that draft from the hidden states of a target model: what they have in common.

A file of a head (eagle.py, medusa.py, mtp.py) defines `config`, which reads the head's config.json and refuses what
does not fit the target, and `load`, which packs its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.core.errors import BadRequest
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel, packed_bytes
from quire.models.renamed_checkpoint import RenamedCheckpoint
from quire.ops.opset import OpSet, Value
from quire.weights.checkpoint import Checkpoint
from quire.weights.config import CheckpointConfig


@dataclass(frozen=True, slots=True)
class DraftHead:
    """Forward passes that read hidden states (`OpSet.hidden_states`), bound to their weights."""

    config: ModelConfig | None  # the sizes of its KV cache; None: it has none
    columns: int  # of the hidden states that it reads
    taps: tuple[int, ...]  # the target's hidden states that these are made of, as `OpSet.tap` counts them
    fuse: Callable[[OpSet, Sequence[Value]], Value]  # those of all taps -> [T, columns]
    # (ops, batch) -> logits. With a KV cache: one, whose hidden states, which it keeps, are what it reads for the next
    # token. Without: one for each token.
    forwards: Sequence[Callable[[OpSet, Any], Value]]
    weights: Sequence[Mapping[str, Any]]  # its own; those of the target that it shares are not among them

    @property
    def weight_bytes(self) -> int:
        return packed_bytes(self.weights)


class HeadFile(Protocol):
    """A kind of draft heads: the functions that its file defines."""

    def config(self, checkpoint: Checkpoint, target: ModelConfig) -> Any:
        """The sizes of the head; refuses one that cannot draft for the target."""

    def load(
        self, ops: OpSet, checkpoint: Checkpoint, config: Any, target: LoadedModel, max_model_len: int
    ) -> DraftHead: ...


def first_tap(ops: OpSet, taps: Sequence[Value]) -> Value:
    """`DraftHead.fuse` of a head that reads hidden states as they are."""
    (x,) = taps
    return x


class NamedCheckpoint(RenamedCheckpoint):
    """Tensors under the names of the head's file, and a configuration with a name for errors."""

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str], architecture: str) -> None:
        super().__init__(checkpoint, names)
        self._config = checkpoint.config.with_values({"architectures": [architecture]})

    @property
    def config(self) -> CheckpointConfig:
        return self._config


def misfit(checkpoint: Checkpoint, problem: str, hint: str) -> BadRequest:
    """A head that cannot draft for the target."""
    return BadRequest(f"the head {checkpoint.path.name} {problem}", hint, param="speculative_config")


def check_sizes(checkpoint: Checkpoint, hidden: int, vocab: int, target: ModelConfig) -> None:
    """A head reads the target's hidden states, and drafts the target's tokens."""
    hint = f"draft with a head that was trained for this `{target.architecture}`"
    if hidden != target.hidden:
        raise misfit(
            checkpoint, f"reads hidden states of {hidden:,} columns, and the model's have {target.hidden:,}", hint
        )
    if vocab != target.vocab:
        raise misfit(checkpoint, f"drafts from {vocab:,} tokens, and the model has {target.vocab:,}", hint)
