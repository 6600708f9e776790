"""Drafts of heads that read the target's hidden states: what all methods with a head have in common."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.core.draft_tree import DraftTree, accepted_path
from quire.core.plan import Run
from quire.ops.opset import Int32, StepBatch, Value
from quire.ops.philox import random_bits
from quire.ops.race import exponentials
from quire.ops.row_params import RowParams
from quire.runtime.spec.drafting import Candidates, DraftingProposer
from quire.runtime.spec.growing_tree import GrowingTree
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
    num_unasked: int = 0  # steps since drafts were last wanted
    num_read: int = -1  # leading positions whose hidden states it has read; -1: not known before the first run
    # If the last run verified a tree: the place of its first draft, the drafts, and their parents.
    tree: tuple[int, list[int], list[int]] | None = None


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

    def _new_row(self, params: RowParams, num_prompt: int) -> HeadRow:
        return HeadRow(params, num_prompt)

    def tapped(self, forward: Callable[[Any, Any], Value]) -> Callable[[Any, Any], Value]:
        return with_taps(forward, self._head)

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        """Keep the hidden states of runs that sample: at the end of each, as many as a row has room for."""
        self._forget_unasked(runs)
        places: list[int] = []
        lines: list[int] = []
        for run, last in zip(runs, batch.seq_starts[1:].tolist(), strict=True):
            if row := self._drafted.get(run.row):
                end = run.start + run.count
                row.tree = (end - len(run.drafts), run.drafts, run.parents) if run.parents else None
                if self._samples(run):
                    count, first = min(run.count, self._window), run.row * self._window
                    places += [first + place % self._window for place in range(end - count, end)]
                    lines += range(last - count, last)
        if places:
            self._hidden.put(np.array(places, np.int32), self._target, np.array(lines, np.int32))

    def _forget_unasked(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if (row := self._drafted.get(run.row)) and self._samples(run):
                row.num_unasked += 1
                if row.num_unasked > MAX_UNASKED:
                    del self._drafted[run.row]

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int] | DraftTree]:
        texts = self._texts(known, counts)
        for row in texts:
            self._drafted[row].num_unasked = 0
        chains = {row: tokens for row, tokens in texts.items() if counts[row] <= self._num_tokens}
        for row, tokens in chains.items():
            self._sampler.admit(row, self._drafted[row].params, tokens, self._drafted[row].num_prompt)
        drafts: dict[int, list[int] | DraftTree] = {}
        if chains:
            drafts |= {row: of_row for row, of_row in self._draft(chains, counts).items() if of_row}
        for row in chains:
            self._sampler.retire(row)
        if trees := {row: tokens for row, tokens in texts.items() if row not in chains}:
            grown = self._draft_trees(trees)
            drafts |= {row: tree for row in trees if (tree := grown[row].best(counts[row])).tokens}
        return drafts

    def _draft(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        """So many drafts of each row, whose tokens are given; the sampler has the row."""
        raise NotImplementedError

    def _draft_trees(self, texts: Mapping[int, Int32]) -> Mapping[int, GrowingTree]:
        """A tree of each row, whose tokens are given."""
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

    def _samples(self, run: Run) -> bool:
        return bool(run.start + run.count == self._rows.num_known[run.row])

    def _window_rows(self, row: int, places: Int32) -> Int32:
        return row * self._window + places % self._window

    def _rows_of(self, row: int, first: int, tokens: Int32) -> Int32:
        """Where the hidden states of a row's positions are kept, from `first` to the one before the last token. Those
        of accepted drafts of a tree are at the places of their nodes."""
        places = np.arange(first, len(tokens) - 1, dtype=np.int32)
        if tree := self._drafted[row].tree:
            begin, drafts, parents = tree
            path = np.array(accepted_path(drafts, parents, tokens[begin:].tolist()), np.int32)
            behind = np.flatnonzero((places >= begin) & (places < begin + len(path)))
            places[behind] = begin + path[places[behind] - begin]
        return self._window_rows(row, places)
