"""The contract of compiled forward passes: programs, chains of their steps, and the hidden states they keep."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quire.ops.sampler import Sampler
from quire.ops.step_batch import Float32, Int32, Int64, StepBatch

GrownTree = tuple[list[int], list[int], list[float]]  # tokens, parents (a node before, or -1), probabilities after them


class Program(Protocol):
    """A forward pass bound to its weights and cache."""

    takes_trees: bool  # whether a batch may have `ancestors`, and a token then has the bits that a chain would give it
    kept: Any  # [T, columns] the hidden states that the last run kept (`OpSet.keep`), valid until the next; or None
    chain: "Chain | None"  # where steps may follow each other without the host

    def run(self, batch: StepBatch) -> Any:
        """-> logits [R, vocab] fp32, valid until the next run."""


class Chain(Protocol):
    """Steps of one token for each of these rows, drawn by the sampler that the program was compiled with; or steps of
    the nodes of a level of trees."""

    takes_trees: bool

    def takes(self, rows: Sequence[int], count: int, num_tokens: int) -> bool:
        """Whether so many tokens of these rows can be drawn without the host, after a step of `num_tokens`."""

    def takes_verified(self, rows: Sequence[int], count: int, num_tokens: int) -> bool:
        """The same with `verified`: whether nothing about these rows but their number of tokens must be known."""

    def takes_unknown_trees(self, rows: Sequence[int], target: Any) -> bool:
        """Whether the host need not know trees of these rows until they are verified. If `takes_trees`."""

    def run(
        self,
        batch: StepBatch,
        rows: Sequence[int],
        count: int,
        target: Any,
        verified: "VerifiedLines | None" = None,
    ) -> bool:
        """`batch` is the first of `count` steps: the positions of each row that have not been read, up to the one
        before its last token. Each later step computes one token of each row, the one that the step before sampled,
        with the hidden state that it kept. These `count` tokens are drafts that `target`, a sampler of the same op set,
        keeps. Nothing waits. -> whether `take_steps` will tell what they took

        With `verified`, only the device knows how many of the last drafts `target` has accepted: the batch has all of
        them, its ids mean nothing, and the chain goes on behind the accepted ones."""

    def read_drafts(self, row: int, count: int, target: Any) -> list[int]:
        """The tokens that were drafted for a row; waits for them."""

    def take_steps(self) -> list[tuple[int, float]]:
        """Of the runs that have ended since the last call, the rows of each step and the seconds that it took."""

    def grow(
        self, logits: Any, kept: Any, roots: "TreeRoots", shape: "TreeShape", keeper: "TreeKeeper | None" = None
    ) -> "Callable[[], list[GrownTree]]":
        """A tree of drafts for each sequence, from the logits [S, vocab] of the roots and what their step kept. Of each
        level, the nodes that are the likeliest with all before them are computed. Their children are the most likely
        tokens or, where tokens are sampled, the candidates that lead the race which will sample the token. The result
        waits, and has the likeliest nodes of all, in that order. If `takes_trees`.

        With a `keeper`, its sampler keeps the nodes as drafts, so that nothing has to wait."""

    def grow_behind(
        self, batch: StepBatch, roots: "TreeRoots", shape: "TreeShape", keeper: "TreeKeeper", verified: "VerifiedRuns"
    ) -> "tuple[Callable[[], list[GrownTree]], bool]":
        """The same behind drafts that the keeper's sampler is verifying: only the device knows which are accepted.
        `batch` has `1 + verified.max_depth` tokens of each sequence, from the last known one on, as if so many drafts
        were accepted. Their ids and rows of hidden states mean nothing, and `roots` are as if none were; keys are those
        of `max_depth` more levels. -> trees, and whether `take_steps` will tell what they took"""


@dataclass(frozen=True, slots=True)
class VerifiedLines:
    """T tokens of S sequences: what a sampler verifies, and this process does not know yet."""

    lines: Int32  # [T] of the logits that were verified last: what they sampled follows the token
    known: Int32  # [S] tokens of the text before
    lengths: Int32  # [S] tokens of the text with those sampled, if it is known; -1: the sampler knows


@dataclass(frozen=True, slots=True)
class VerifiedRuns:
    """S sequences whose drafts a sampler verifies, chains or trees, and this process does not know what is accepted."""

    first_lines: Int32  # [S] of the logits that were verified last
    known: Int32  # [S] tokens of the text before
    max_depth: int  # of the drafts
    window: int  # rows of hidden states of a row: that of place p is row * window + p % window


@dataclass(frozen=True, slots=True)
class TreeKeeper:
    """Who keeps trees as drafts."""

    sampler: Any  # of the target, of the same op set
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class TreeShape:
    num_levels: int
    top_k: int  # nodes of a level that are computed
    num_children: int  # of a node
    num_candidates: int  # for them: more than there are children where tokens are sampled
    num_nodes: int  # of a tree, at most: the likeliest

    @property
    def num_found(self) -> int:
        """Nodes of a tree, some of which may be impossible."""
        return min(self.num_nodes, self.num_children * (1 + (self.num_levels - 1) * self.top_k))


@dataclass(frozen=True, slots=True)
class TreeRoots:
    """S sequences behind which trees grow: nodes are computed at the places behind the text, one after the other."""

    positions: Int32  # [S] of the first level
    block_tables: Int32  # [S, W]
    lines: Int32  # [S] of the root's hidden state, in what its step kept
    temperatures: Float32  # [S] 0: greedy
    keys: Int64  # [S, levels, 2] of the race (ops/race.py) of each level


class HiddenStates(Protocol):
    """Rows of hidden states, zero at first, that outlive the step that computed them."""

    def put(self, rows: Int32, program: Program, lines: Int32) -> None:
        """Copy `lines` of what the last run of the program kept to `rows`."""

    def load(self, values: Float32) -> None:
        """Copy values [n, columns] of the host to the first n rows."""


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """What a forward pass is compiled for: the largest step, and what it reads and writes beside its batch."""

    max_tokens: int  # of a step
    max_rows: int = 0  # sequences of a step
    max_model_len: int = 0
    sampler: Sampler | None = None  # an id below zero stands for the token that it sampled last for row ~id
    sources: bool = False  # the model is an encoder, or a decoder with cross-attention
    tree_nodes: int = 0  # drafts of a sequence that come as a tree, at most; 0: they are chains, and a tree is slower
    max_drafts: int = 0  # that a step verifies of a sequence; 0: it verifies none
    hidden: HiddenStates | None = None  # what `hidden_states` reads
