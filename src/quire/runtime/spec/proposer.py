"""What the runner asks of a speculative method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.core.draft_tree import DraftTree
from quire.core.plan import Admission, Run, StepPlan
from quire.ops.kv_spec import KVCache
from quire.ops.opset import Int32, OpSet, Program, Sampler, StepBatch, Value

if TYPE_CHECKING:
    from quire.models.draft_head import DraftHead
    from quire.models.loading import LoadedModel
    from quire.runtime.batch import BatchRows
    from quire.runtime.kv import KVSize


@dataclass(frozen=True, slots=True)
class ProposerContext:
    """What a method may build on."""

    ops: OpSet
    model: "LoadedModel"  # the target
    size: "KVSize"  # of the target's KV cache
    max_rows: int
    max_tokens: int  # of one step
    draft: "LoadedModel | None" = None  # the model that a method drafts with, loaded
    head: "DraftHead | None" = None  # or the head
    max_drafts: int = 0  # of a run, by whatever method


@dataclass(frozen=True, slots=True)
class Verified:
    """A row whose drafts are being verified."""

    num_known: int  # tokens before the first draft
    first_line: int  # of the logits that are verified
    num_lines: int  # one more than drafts
    length: int = -1  # tokens of the text, if acceptance is synthetic; -1: only the device knows


class Proposer:
    """Proposes draft tokens. A rejected one costs time and changes nothing."""

    caches: Sequence[KVCache] = ()  # of models of its own: blocks are copied and swapped there as in the target's
    tree_nodes = 0  # of its trees, at most; 0: it proposes chains
    _rows: "BatchRows"
    _target: Program
    _target_sampler: Sampler

    def tapped(self, forward: Callable[[Any, Any], Value]) -> Callable[[Any, Any], Value]:
        """The target's forward pass, with the hidden states that the method wants kept."""
        return forward

    def bind(self, rows: "BatchRows", target: Program, sampler: Sampler) -> None:
        """Where the runner keeps tokens and block tables, and what computes the target and samples its tokens."""
        self._rows, self._target, self._target_sampler = rows, target, sampler

    def admit(self, admission: Admission) -> None:
        """A sequence takes a row."""

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        """The target computes these runs, or has just computed them."""

    def move_blocks(self, plan: StepPlan) -> None:
        """The blocks of `caches` were swapped and copied as the plan says."""

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> Mapping[int, list[int] | DraftTree]:
        """By row, all its tokens [n], valid until this returns, and how many draft tokens are wanted. -> at most so
        many that may follow, UNKNOWN where they are kept on the device, for the rows that have some; a free method may
        propose a tree of more"""
        raise NotImplementedError

    def propose_ahead(self, verified: Mapping[int, Verified], counts: Mapping[int, int]) -> None:
        """Queue so many draft tokens behind what the target's sampler is verifying, if the method can: before this
        process knows what is accepted. `propose` will be asked for them."""

    def read_drafts(self, row: int, count: int) -> list[int]:
        """The tokens that were proposed as UNKNOWN; waits for them."""
        raise NotImplementedError

    def grown_tree(self, row: int) -> Callable[[], DraftTree] | None:
        """The tree that was proposed last for a row, and that only the device knows: the result waits for it."""
        return None

    def take_tree(self, row: int, tree: DraftTree) -> None:
        """What that of a row was, or began with, whose outcome is known now."""

    def take_steps(self) -> list[tuple[int, float]]:
        """Steps of models of its own since the last call: (tokens, seconds). A method without a model has none."""
        return []

    def take_queued_seconds(self) -> float:
        """Of the steps that `take_steps` told last, the seconds that no call has waited for."""
        return 0.0

    def take_untimed(self) -> bool:
        """Whether, since the last call, something was queued or ran whose seconds nobody knows."""
        return False

    def read_rest(self, rows: Sequence[int]) -> None:
        """These rows are retired next, and their blocks are copied to host memory."""

    def retire(self, row: int) -> None:
        """The row belongs to another sequence from now on."""
