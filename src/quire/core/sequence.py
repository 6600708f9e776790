"""One stream of tokens being grown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.core.prefix_tree import PrefixNode
from quire.core.request import IdLogprob
from quire.core.speculation import AcceptanceRate

if TYPE_CHECKING:
    from quire.core.sequence_group import SequenceGroup

Key = tuple[float, ...]  # the place in policy order
NEVER = 2**62
UNKNOWN = -1  # stands for a token that is being drawn
UNREAD = 0  # stands for a block behind the window: runners may take it for one, and will not look into it


class Sequence:
    """The tokens of one sample, how far they are computed, and the blocks their keys and values are in.

    Between steps `table` has exactly the blocks that `num_computed` tokens fill, unless the sequence is swapped out.
    Its first `num_freed` are behind the window, and not held: what stands there means nothing."""

    __slots__ = (
        "acceptance",
        "admitted",
        "candidates",
        "copy_from",
        "drafts",
        "ended",
        "group",
        "host",
        "index_at",
        "key",
        "logprob",
        "node",
        "num_computed",
        "num_freed",
        "num_indexed",
        "num_told",
        "num_unknown",
        "planned",
        "row",
        "running",
        "sample",
        "table",
        "tokens",
    )

    def __init__(self, group: SequenceGroup, sample: int, tokens: list[int]) -> None:
        self.group = group
        self.sample = sample
        self.key: Key = (*group.key, sample)
        self.tokens = tokens  # prompt, then output; at the end those that are being drawn
        self.num_unknown = 0  # how many those are
        self.num_computed = 0  # of those, the ones whose keys and values are in the cache, or will be by this step
        self.table: list[int] = []
        self.num_freed = 0
        self.num_told = 0  # leading blocks of the table that the runner knows
        self.row = -1  # -1: none
        self.admitted = NEVER  # the step in which it took its row
        self.running = False  # in the running queue; else it waits
        self.ended = False
        self.planned = -1  # the last step that computes something of it
        self.num_indexed = 0  # leading blocks of the table that are in the tree
        self.node: PrefixNode | None = None  # of the last of those
        self.index_at = NEVER  # num_computed at which the next block goes into the tree; NEVER: it has left the tree
        self.copy_from: int | None = None  # a held block whose content the next block of the table starts with
        self.host: dict[int, int] = {}  # swapped out: where the blocks went, by their place in the table
        self.candidates: list[IdLogprob] | None = None  # a beam's continuations, until all beams have theirs
        self.drafts: list[int] = []  # guesses at what follows the last known token
        self.acceptance = AcceptanceRate()  # in those
        self.logprob = 0.0  # of the output so far, where it is asked for

    @property
    def num_known(self) -> int:
        return len(self.tokens) - self.num_unknown

    @property
    def held(self) -> list[int]:
        """The blocks of the table that are not behind the window."""
        return self.table[self.num_freed :]

    def expect(self, count: int = 1) -> None:
        """A token is being drawn; the step after may compute it all the same. Or several, which are drafts."""
        self.tokens.extend([UNKNOWN] * count)
        self.num_unknown += count

    def forget(self, count: int) -> None:
        """So many tokens that were expected are not awaited any more."""
        assert count <= self.num_unknown
        del self.tokens[len(self.tokens) - count :]
        self.num_unknown -= count

    def append(self, token: int) -> None:
        """What was drawn, expected or not."""
        if self.num_unknown:
            self.tokens[-self.num_unknown] = token
            self.num_unknown -= 1
        else:
            self.tokens.append(token)
