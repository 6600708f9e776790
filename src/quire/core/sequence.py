"""A sequence: the tokens of one sample, and its state in the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.core.acceptance import AcceptanceRate
from quire.core.plan import Fetch, Proposal, RemotePrefill
from quire.core.prefix_tree import NO_STATE, PrefixNode
from quire.core.request import IdLogprob

if TYPE_CHECKING:
    from quire.core.sequence_group import SequenceGroup

PolicyKey = tuple[float, ...]  # orders sequences; see core/policy.py
NEVER = 2**62
PLACEHOLDER = -1  # a token that is being sampled
NULL_BLOCK = 0  # a block behind the window, which kernels do not read; 0 is a valid id, so runners need no check


class Sequence:
    """The tokens of one sample, how far they are computed, and the KV blocks that hold them.

    Between steps `block_table` has exactly the blocks that `num_computed` tokens fill, unless the sequence is swapped
    out, or shares more blocks of the tree than it has states of. Its first `num_freed` entries are behind the sliding
    window: they are NULL_BLOCK, and not held."""

    __slots__ = (
        "admitted_step",
        "block_table",
        "branch",
        "candidates",
        "checkpoint",
        "checkpoints",
        "copy_from",
        "cumulative_logprob",
        "draft_states",
        "ended",
        "fetch",
        "fetch_seconds",
        "group",
        "host_blocks",
        "host_state",
        "index_at",
        "key",
        "last_checkpoint",
        "mu",
        "node",
        "num_arrived",
        "num_blocks_sent",
        "num_computed",
        "num_fetched",
        "num_fetches",
        "num_freed",
        "num_gained",
        "num_idle",
        "num_indexed",
        "num_placeholders",
        "num_prefills",
        "num_remote",
        "pages",
        "planned_step",
        "prefill",
        "proposals",
        "rates",
        "row",
        "running",
        "sample",
        "state",
        "tokens",
    )

    def __init__(self, group: SequenceGroup, sample: int, tokens: list[int]) -> None:
        self.group = group
        self.sample = sample
        self.key: PolicyKey = (*group.key, sample)
        self.tokens = tokens  # prompt, then output; placeholders at the end
        self.num_placeholders = 0  # tokens that are being sampled, drafts included
        self.num_computed = 0  # tokens whose keys and values are in the cache, or will be after the planned step
        self.block_table: list[int] = []
        self.num_freed = 0  # leading blocks behind the sliding window
        self.pages: dict[int, int] = {}  # index in the block table -> window page that it holds
        self.num_blocks_sent = 0  # leading blocks of the block table that the runner knows
        self.row = -1  # -1: none
        self.admitted_step = NEVER  # the step that gave it its row
        self.running = False  # in the running queue
        self.ended = False
        self.planned_step = -1  # the last step whose plan has a run of it
        self.num_indexed = 0  # leading blocks of the block table that are in the prefix tree
        self.node: PrefixNode | None = None  # of the last of these blocks
        self.index_at = NEVER  # num_computed at which the next block enters the tree; NEVER: it left it
        self.checkpoint = NO_STATE  # the checkpoint slot that its next run continues from
        self.state = NO_STATE  # the slot of the model's state after `num_computed` tokens
        self.checkpoints: dict[int, int] = {}  # position -> slot: states that blocks will have when they enter the tree
        self.last_checkpoint: PrefixNode | None = None  # of its output
        self.branch = 0  # tokens of it that were in the tree when it was admitted
        self.draft_states: list[tuple[int, int]] = []  # (position, slot): before the drafts in flight and after each
        self.copy_from: int | None = None  # copy-on-write: a held block that the next block starts as a copy of
        self.host_blocks: dict[int, int] = {}  # swapped out, or arrived: index in the block table -> host block
        self.host_state = NO_STATE  # swapped out, or arrived: the host slot of the state after `num_computed` tokens
        self.fetch: Fetch | None = None  # blocks from the disk that it waits for
        self.num_fetches = 0  # how often it has asked for blocks from the disk
        self.num_arrived = 0  # leading tokens that are computed if blocks that arrived on the host are swapped in
        self.num_fetched = 0  # of these, tokens in blocks from the disk
        self.num_gained = 0  # tokens that are not computed because a state arrived on the host
        self.fetch_seconds = 0.0  # seconds that it waited for blocks from the disk
        self.prefill: RemotePrefill | None = None  # blocks from another engine that it waits for
        self.num_prefills = 0  # how often it has asked other engines for blocks
        self.num_remote = 0  # tokens that other engines have computed for it; they are no hits of the prefix cache
        self.candidates: list[IdLogprob] | None = None  # continuations of a beam, until all beams have theirs
        self.proposals: list[Proposal] = []  # draft tokens that may follow the last known token
        self.num_idle = 0  # its last runs for which there were draft tokens that did not pay
        self.rates: dict[str, AcceptanceRate] = {}  # of its drafts, by method
        self.mu: float | None = None  # mirostat's, after the known tokens; None: at its start
        self.cumulative_logprob = 0.0  # of the output so far, if logprobs are requested

    @property
    def num_known(self) -> int:
        return len(self.tokens) - self.num_placeholders

    @property
    def held_blocks(self) -> list[int]:
        """The blocks of the block table that are not behind the window."""
        return self.block_table[self.num_freed :]

    def first_arrived(self, block_size: int) -> int:
        """The first block that arrived on the host: what precedes it is in the pool."""
        return min(self.host_blocks, default=self.num_arrived // block_size)

    def take_unsent_blocks(self) -> list[int]:
        """The blocks that the runner does not know yet; the caller sends them."""
        blocks = self.block_table[self.num_blocks_sent :]
        self.num_blocks_sent = len(self.block_table)
        return blocks

    def add_placeholders(self, count: int = 1) -> None:
        """Reserve positions for tokens that a step in flight samples; the next step may compute them already."""
        self.tokens.extend([PLACEHOLDER] * count)
        self.num_placeholders += count

    def drop_placeholders(self, count: int) -> None:
        """Remove the last `count` placeholders."""
        assert count <= self.num_placeholders, f"{count} placeholders are dropped of {self.num_placeholders}"
        del self.tokens[len(self.tokens) - count :]
        self.num_placeholders -= count

    def append(self, token: int) -> None:
        """Add a sampled token: in place of the first placeholder, if there is one."""
        if self.num_placeholders:
            self.tokens[-self.num_placeholders] = token
            self.num_placeholders -= 1
        else:
            self.tokens.append(token)
