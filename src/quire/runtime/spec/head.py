"""Drafts of heads that read the target's hidden states: what all methods with a head have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.draft_tree import DraftTree, accepted_path, is_unknown
from quire.core.plan import Admission, Run
from quire.ops.opset import Int32, StepBatch, Value
from quire.ops.philox import random_bits
from quire.ops.race import exponentials
from quire.ops.row_params import RowParams
from quire.runtime.spec.draft_blocks import spread
from quire.runtime.spec.drafting import Candidates, DraftingProposer
from quire.runtime.spec.proposer import ProposerContext
from quire.runtime.spec.taps import with_taps

MAX_UNASKED = 8  # steps of a sequence after which no drafts were wanted: then it is left alone
CHILDREN = 2  # of a node, times the nodes of a level that are computed: looking at one more costs next to nothing
RACERS = 2  # tokens for each child of a tree, of which the race chooses


@dataclass(slots=True)
class HeadRow:
    """A sequence as the head knows it."""

    params: RowParams
    num_prompt: int


@dataclass(frozen=True, slots=True)
class HeadRuns:
    """The runs of a step whose rows get drafts, as arrays."""

    rows: Int32  # [n], as the others
    starts: Int32
    counts: Int32
    ends: Int32  # of their tokens in the step
    samples: NDArray[np.bool_]  # whether the run reaches the last known token


class HeadProposer(DraftingProposer[HeadRow]):
    """Keeps the hidden states of each row's last positions until the token behind them is known.

    Row r has `_window` rows of hidden states: those of place p are row r * _window + p % _window. Behind them lie
    `draft_rows` for the drafts of each row, and those of the tokens of a step.

    Where drafts do not pay, reading costs time as well: a row that none were wanted for in several steps is read no
    longer, and gets none any more.

    A row that is asked for more drafts than `num_tokens` gets a tree: of `tree_top_k` continuations of a node, at most
    `tree_nodes` in all, the likeliest."""

    def __init__(
        self, context: ProposerContext, num_tokens: int, tree_nodes: int, tree_top_k: int, draft_rows: int = 1
    ) -> None:
        assert context.head is not None
        super().__init__(context, context.model.config.vocab)
        self._head, self._num_tokens = context.head, num_tokens
        self.tree_nodes, self._top_k, self._draft_rows = tree_nodes, tree_top_k, draft_rows
        self._num_children = CHILDREN * tree_top_k
        # A step's token and drafts, and with async scheduling the next step's token.
        self._window = max(num_tokens, tree_nodes, context.max_drafts) + 2
        self._first_draft = context.max_rows * self._window
        self._first_token = self._first_draft + context.max_rows * draft_rows
        self._hidden = context.ops.new_hidden_states(self._first_token + context.max_tokens, self._head.columns)
        self._is_drafted = np.zeros(context.max_rows, np.bool_)  # by row: the keys of `_drafted`
        self._num_unasked = np.zeros(context.max_rows, np.int32)  # by row: steps since drafts were last wanted
        # By row: leading positions whose hidden states it has read; -1: not known before the first run.
        self._num_read = np.full(context.max_rows, -1, np.int32)
        # Of the rows whose last run verified a tree: the place of its first draft, the drafts, and their parents.
        self._trees: dict[int, tuple[int, list[int], list[int]]] = {}

    def _new_row(self, params: RowParams, num_prompt: int) -> HeadRow:
        return HeadRow(params, num_prompt)

    def admit(self, admission: Admission) -> None:
        row = admission.row
        if admission.reads_along:
            super().admit(admission)
        self._is_drafted[row], self._num_unasked[row], self._num_read[row] = row in self._drafted, 0, -1

    def retire(self, row: int) -> None:
        super().retire(row)
        self._is_drafted[row] = False
        self._trees.pop(row, None)

    def take_tree(self, row: int, tree: DraftTree) -> None:
        begin, drafts, parents = self._trees.get(row, (0, [], []))
        if is_unknown(parents):
            self._trees[row] = begin, tree.tokens[: len(drafts)], tree.parents[: len(drafts)]

    def tapped(self, forward: Callable[[Any, Any], Value]) -> Callable[[Any, Any], Value]:
        return with_taps(forward, self._head)

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        """Keep the hidden states of runs that sample: at the end of each, as many as a row has room for."""
        if self._drafted:
            self._keep(runs, self._head_runs(runs, batch))

    def _head_runs(self, runs: Sequence[Run], batch: StepBatch) -> HeadRuns:
        """Without rows that none were wanted for in several steps."""
        rows, starts, counts = np.array([(run.row, run.start, run.count) for run in runs], np.int32).T
        samples = starts + counts == self._rows.num_known[rows]
        self._num_unasked[rows] += samples
        for row in rows[self._is_drafted[rows] & (self._num_unasked[rows] > MAX_UNASKED)].tolist():
            self.retire(row)
        kept = self._is_drafted[rows]
        return HeadRuns(rows[kept], starts[kept], counts[kept], batch.seq_starts[1:][kept], samples[kept])

    def _keep(self, runs: Sequence[Run], of_heads: HeadRuns) -> None:
        if self._trees or any(run.parents for run in runs):
            for run in runs:
                self._trees.pop(run.row, None)
                if run.parents and run.row in self._drafted:
                    self._trees[run.row] = run.start + run.count - len(run.drafts), run.drafts, run.parents
        samples, rows = of_heads.samples, of_heads.rows[of_heads.samples]
        if not len(rows):
            return
        counts = np.minimum(of_heads.counts[samples], self._window)
        of_place, places = spread((of_heads.starts + of_heads.counts)[samples] - counts, counts)
        _, lines = spread(of_heads.ends[samples] - counts, counts)
        self._hidden.put(self._window_rows(rows[of_place], places), self._target, lines)

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int] | DraftTree]:
        texts = self._texts(known, counts)
        self._num_unasked[list(texts)] = 0
        chains = {row: tokens for row, tokens in texts.items() if counts[row] <= self._num_tokens}
        drafts: dict[int, list[int] | DraftTree] = {}
        if chains:
            of_rows = [self._drafted[row] for row in chains]
            self._sampler.admit_all(
                list(chains),
                [one.params for one in of_rows],
                list(chains.values()),
                [one.num_prompt for one in of_rows],
            )
            drafts |= {row: of_row for row, of_row in self._draft(chains, counts).items() if of_row}
            self._sampler.retire_all(list(chains))
        if len(chains) < len(texts):
            trees = {row: tokens for row, tokens in texts.items() if row not in chains}
            grown = self._draft_trees(trees, counts)
            drafts |= {row: tree for row, tree in grown.items() if tree.tokens}
        return drafts

    def _draft(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """So many drafts of each row, whose tokens are given; the sampler has the row."""
        raise NotImplementedError

    def _draft_trees(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> Mapping[int, DraftTree]:
        """A tree of so many nodes of each row, whose tokens are given."""
        raise NotImplementedError

    def _num_candidates(self, rows: Iterable[int]) -> int:
        """Of a line of logits, what `_children` chooses from."""
        sampled = any(not self._drafted[row].params.is_greedy for row in rows)
        return self._num_children * RACERS if sampled else self._num_children

    def _children(self, row: int, position: int, lines: Sequence[Candidates]) -> list[Candidates]:
        """For the token at `position`, the children of each node of a level, with their confidences: the most likely
        tokens or, where tokens are sampled, those that lead the race which will sample the token."""
        params = self._drafted[row].params
        if params.is_greedy:
            return [line[: self._num_children] for line in lines]
        key, _ = random_bits(params.seed, position, params.sample)
        numbers = iter(exponentials(key, np.array([id for line in lines for id, _ in line], np.int64)).tolist())
        children = []
        for line in lines:
            speeds = [(id, p ** (1.0 / params.temperature) / next(numbers)) for id, p in line]
            total = sum(speed for _, speed in speeds) or 1.0
            leading = sorted(speeds, key=lambda one: -one[1])[: self._num_children]
            children.append([(id, speed / total) for id, speed in leading])
        return children

    def _window_rows(self, rows: Int32 | int, places: Int32) -> Int32:
        return rows * self._window + places % self._window

    def _rows_of(self, row: int, first: int, tokens: Int32) -> Int32:
        """Where the hidden states of a row's positions are kept, from `first` to the one before the last token. Those
        of accepted drafts of a tree are at the places of their nodes."""
        places = np.arange(first, len(tokens) - 1, dtype=np.int32)
        if tree := self._trees.get(row):
            begin, drafts, parents = tree
            path = np.array(accepted_path(drafts, parents, tokens[begin:].tolist()), np.int32)
            behind = np.flatnonzero((places >= begin) & (places < begin + len(path)))
            places[behind] = begin + path[places[behind] - begin]
        return self._window_rows(row, places)
