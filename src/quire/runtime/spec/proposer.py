"""What the runner asks of a speculative method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.core.plan import Admission
from quire.ops.opset import Int32, OpSet

if TYPE_CHECKING:
    from quire.models.loading import LoadedModel
    from quire.runtime.kv import KVSize


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a method may build on. A draft model loads its weights with `ops`, and keeps KV under the same block ids."""

    ops: OpSet
    model: "LoadedModel"  # the target
    size: "KVSize"  # of the target's KV cache
    max_rows: int
    max_tokens: int  # of one step


class Proposer(Protocol):
    """Proposes draft tokens. A rejected one costs time and changes nothing."""

    def admit(self, admission: Admission) -> None:
        """A sequence takes a row."""

    def propose(self, known: Mapping[int, Int32]) -> dict[int, list[int]]:
        """By row, all its tokens [n], valid until this returns. -> draft tokens that may follow, for the rows that have
        some"""

    def retire(self, row: int) -> None:
        """The row belongs to another sequence from now on."""
