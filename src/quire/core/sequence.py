"""One stream of tokens being grown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.core.draft_budget import AcceptanceRate
from quire.core.prefix_tree import PrefixNode
from quire.core.request import IdLogprob

if TYPE_CHECKING:
    from quire.core.sequence_group import SequenceGroup

PolicyKey = tuple[float, ...]  # the place in policy order
NEVER = 2**62
PLACEHOLDER = -1  # stands for a token that is being drawn
NULL_BLOCK = 0  # stands for a block behind the window: runners may take it for one, and will not look into it


class Sequence:
    """The tokens of one sample, how far they are computed, and the blocks their keys and values are in.

    Between steps `table` has exactly the blocks that `num_computed` tokens fill, unless the sequence is swapped out.
    Its first `num_freed` are behind the window, and not held: what stands there means nothing."""

    __slots__ = (
        "acceptance",
        "admitted_step",
        "block_table",
        "candidates",
        "copy_from",
        "cumulative_logprob",
        "drafts",
        "ended",
        "group",
        "host_blocks",
        "index_at",
        "key",
        "node",
        "num_blocks_sent",
        "num_computed",
        "num_freed",
        "num_indexed",
        "num_placeholders",
        "planned_step",
        "row",
        "running",
        "sample",
        "tokens",
    )

    def __init__(self, group: SequenceGroup, sample: int, tokens: list[int]) -> None:
        self.group = group
        self.sample = sample
        self.key: PolicyKey = (*group.key, sample)
        self.tokens = tokens  # prompt, then output; at the end those that are being drawn
        self.num_placeholders = 0  # how many those are
        self.num_computed = 0  # of those, the ones whose keys and values are in the cache, or will be by this step
        self.block_table: list[int] = []
        self.num_freed = 0
        self.num_blocks_sent = 0  # leading blocks of the table that the runner knows
        self.row = -1  # -1: none
        self.admitted_step = NEVER  # the step in which it took its row
        self.running = False  # in the running queue; else it waits
        self.ended = False
        self.planned_step = -1  # the last step that computes something of it
        self.num_indexed = 0  # leading blocks of the table that are in the tree
        self.node: PrefixNode | None = None  # of the last of those
        self.index_at = NEVER  # num_computed at which the next block goes into the tree; NEVER: it has left the tree
        self.copy_from: int | None = None  # a held block whose content the next block of the table starts with
        self.host_blocks: dict[int, int] = {}  # swapped out: where the blocks went, by their place in the table
        self.candidates: list[IdLogprob] | None = None  # a beam's continuations, until all beams have theirs
        self.drafts: list[int] = []  # guesses at what follows the last known token
        self.acceptance = AcceptanceRate()  # in those
        self.cumulative_logprob = 0.0  # of the output so far, where it is asked for

    @property
    def num_known(self) -> int:
        return len(self.tokens) - self.num_placeholders

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of the table that are not behind the window."""
        return self.block_table[self.num_freed :]

    def take_unsent_blocks(self) -> list[int]:
        """The blocks that the runner does not know yet; the caller sends them."""
        blocks = self.block_table[self.num_blocks_sent :]
        self.num_blocks_sent = len(self.block_table)
        return blocks

    def add_placeholders(self, count: int = 1) -> None:
        """A token is being drawn; the step after may compute it all the same. Or several, which are drafts."""
        self.tokens.extend([PLACEHOLDER] * count)
        self.num_placeholders += count

    def drop_placeholders(self, count: int) -> None:
        """So many tokens that were expected are not awaited any more."""
        assert count <= self.num_placeholders
        del self.tokens[len(self.tokens) - count :]
        self.num_placeholders -= count

    def append(self, token: int) -> None:
        """What was drawn, expected or not."""
        if self.num_placeholders:
            self.tokens[-self.num_placeholders] = token
            self.num_placeholders -= 1
        else:
            self.tokens.append(token)
