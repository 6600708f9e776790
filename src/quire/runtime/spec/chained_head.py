"""Drafts of a head with a decoder layer (EAGLE, EAGLE-3, MTP): one after the other, or one level of a tree after the
other, each from the head's own hidden state of the one before."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from quire.core.draft_tree import ROOT, UNKNOWN_PARENT, DraftTree, ancestor_words, without_chain
from quire.core.plan import UNKNOWN, Run
from quire.ops.opset import (
    GrownTree,
    Int32,
    ProgramSpec,
    StepBatch,
    TreeKeeper,
    TreeRoots,
    TreeShape,
    VerifiedLines,
    VerifiedRuns,
)
from quire.ops.philox import random_bits
from quire.ops.row_params import RowParams
from quire.runtime.kv import kv_spec
from quire.runtime.spec.draft_blocks import DraftBlocks, spread
from quire.runtime.spec.growing_tree import ComputedTree
from quire.runtime.spec.head import HeadProposer, HeadRuns
from quire.runtime.spec.proposer import ProposerContext, Verified

NO_ROWS = np.zeros(0, np.int32)
MAX_UNKNOWN_TREES = 4  # of a step: of more, the likeliest nodes of all are worth knowing


class ChainedHead(HeadProposer):
    """Position p of its cache is made of the target's hidden state of position p and of token p + 1, and gives token
    p + 2. Positions behind a draft are computed anew when the target has verified it.

    Of each level of a tree, the `tree_top_k` likeliest nodes are computed (EAGLE-2), at places behind the text, one
    after the other: a node of a later level sees its ancestors there."""

    def __init__(
        self,
        context: ProposerContext,
        num_tokens: int,
        draft_tensor_parallel_size: int = 1,
        tree_nodes: int = 0,
        tree_top_k: int = 0,
    ) -> None:
        self._max_computed = (num_tokens - 1) * tree_top_k if tree_nodes else 0  # nodes of a tree
        super().__init__(context, num_tokens, tree_nodes, tree_top_k, draft_rows=1 + self._max_computed)
        self._queued_seconds = 0.0
        self._num_untimed = 0  # steps whose time tells nothing: that of a chain in it is not known
        self._ahead: dict[int, Verified] = {}  # rows whose drafts are queued, behind what is being verified
        # By row, the trees that were queued together, and the number of the row's among them.
        self._grown: dict[int, tuple[Callable[[], list[GrownTree]], int]] = {}
        size, config = context.size, self._head.config
        assert config is not None
        self._max_length = min(self._max_length, config.max_length)
        behind = num_tokens + self._max_computed if tree_nodes else num_tokens  # a tree behind accepted drafts
        self._blocks = DraftBlocks(size.num_blocks, size.spec.block_size, behind)
        spec = kv_spec(config, size.spec.block_size, size.spec.dtype)
        cache = context.ops.new_cache(spec, self._blocks.num_blocks(context.max_rows), size.num_host_blocks)
        self.caches = (cache,)
        (forward,) = self._head.forwards
        max_tokens = context.max_tokens + self._first_token  # the tokens of a step, and those kept before
        self._program = context.ops.compile(
            forward,
            cache,
            ProgramSpec(
                max_tokens,
                context.max_rows,
                size.max_model_len,
                self._sampler,
                tree_nodes=self._max_computed,
                hidden=self._hidden,
            ),
        )

    def _num_places(self, count: int) -> int:
        return count if count <= self._num_tokens else max(self._num_tokens, self._max_computed)

    # ---- reading

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        """Prompts are read chunk by chunk, as the target reads them; what was sampled when drafts are proposed, or when
        no more can be kept."""
        if not self._drafted:
            return
        of_heads = self._head_runs(runs, batch)
        self._make_room(of_heads)
        self._keep(runs, of_heads)
        rows = of_heads.rows
        self._num_read[rows] = np.where(self._num_read[rows] < 0, of_heads.starts, self._num_read[rows])
        counts = self._num_readable(of_heads)
        if counts.any():
            reads = counts > 0
            rows, starts, counts = rows[reads], of_heads.starts[reads], counts[reads]
            first_lines = (of_heads.ends - of_heads.counts)[reads]
            of_place, positions = spread(starts, counts)
            places = self._first_token + np.arange(len(positions), dtype=np.int32)
            self._hidden.put(places, self._target, spread(first_lines, counts)[1])
            ids = self._rows.tokens[rows[of_place], positions + 1]
            self._num_read[rows] = starts + counts
            self._read(self._blocks.batch_of(self._rows, rows, starts, counts, ids), places)

    def _num_readable(self, runs: HeadRuns) -> Int32:
        """Leading positions of runs that have a known token behind them, if they are more than are kept."""
        past_window = np.where(runs.counts > self._window, runs.counts - 1, 0)
        return np.where(runs.samples, past_window, runs.counts)

    def _make_room(self, runs: HeadRuns) -> None:
        """Read positions that no drafts were proposed for, before their hidden states are overwritten: those of an
        accepted branch of a tree, which are not where a chain has them, and those that become too many. (The token at
        the start of a run may not be known yet, unless the run before it had drafts. So the position before stays.)"""
        num_read = self._num_read[runs.rows]
        trees = np.isin(runs.rows, list(self._trees)) if self._trees else np.zeros(len(runs.rows), np.bool_)
        ends = np.where(trees, runs.starts, runs.starts - 1)
        is_full = trees | (runs.starts + runs.counts - num_read > self._window)
        pieces: dict[int, tuple[int, Int32]] = {}
        places = []
        for index in np.flatnonzero((num_read >= 0) & (num_read < ends) & is_full).tolist():
            row, first, end = int(runs.rows[index]), int(num_read[index]), int(ends[index])
            tokens = self._rows.tokens[row, : end + 1]
            pieces[row] = first, tokens[first + 1 :]
            places.append(self._rows_of(row, first, tokens))
            self._num_read[row] = end
        if pieces:
            self._read(self._blocks.batch(self._rows, pieces), np.concatenate(places))

    def read_rest(self, rows: Sequence[int]) -> None:
        """What no drafts were asked for since: the hidden states of these rows are not kept."""
        texts = {row: self._rows.tokens[row, : self._rows.num_known[row]] for row in rows if row in self._drafted}
        unread = {row: text for row, text in texts.items() if 0 <= self._num_read[row] < len(text) - 1}
        unread = {row: text for row, text in unread.items() if (text[self._num_read[row] :] >= 0).all()}
        if unread:
            self._program.run(replace(self._unread(unread), logit_rows=NO_ROWS))

    def _read(self, batch: StepBatch, places: Int32) -> None:
        """Compute keys and values of these positions; their hidden states are in those places."""
        self._program.run(replace(batch, logit_rows=NO_ROWS, hidden_rows=places))

    def _unread(self, texts: Mapping[int, Int32], ahead: int = 0) -> StepBatch:
        """The positions of each row that the head has not read, up to the one before the last token."""
        rows = np.fromiter(texts, np.int32, len(texts))
        ends = np.fromiter(map(len, texts.values()), np.int32, len(texts)) - 1
        starts = self._num_read[rows]
        of_place, positions = spread(starts, ends - starts)
        of_rows = rows[of_place]
        places = self._window_rows(of_rows, positions)
        for index, (row, tokens) in enumerate(texts.items() if self._trees else ()):
            if row in self._trees:
                places[of_place == index] = self._rows_of(row, int(starts[index]), tokens)
        ids = self._rows.tokens[of_rows, positions + 1]
        self._num_read[rows] = ends
        batch = self._blocks.batch_of(self._rows, rows, starts, ends - starts, ids, ahead)
        batch.hidden_rows = places
        return batch

    # ---- chains

    def _draft(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        batch = self._unread(texts, self._num_tokens)
        rows, tables = list(texts), batch.block_tables
        count = max(counts[row] for row in rows)
        chain = self._program.chain
        if chain is not None and chain.takes(rows, count, batch.num_tokens):
            # All steps are queued, and the target's next one as well, before the first draft is known here.
            self._note_timed(chain.run(batch, rows, count, self._target_sampler))
            return {row: [UNKNOWN] * counts[row] for row in rows}
        drafts: dict[int, list[int]] = {row: [] for row in texts}
        for number in range(count):
            before = {row: line for line, row in enumerate(rows)}
            last = self._draw(self._program, batch, rows)
            for row, token in last.items():
                drafts[row].append(token)
            rows = [row for row in last if counts[row] > number + 1]
            if not rows:
                break
            kept = [before[row] for row in rows]
            places = self._draft_places(rows, 0)
            self._hidden.put(places, self._program, batch.logit_rows[kept])
            tables = tables[kept]
            positions = np.array([len(texts[row]) - 1 + number for row in rows], np.int32)
            ids = np.array([last[row] for row in rows], np.int32)
            batch = replace(self._blocks.next(tables, positions, ids), hidden_rows=places)
        return drafts

    def propose_ahead(self, verified: Mapping[int, Verified], counts: Mapping[int, int]) -> None:
        """The device goes on behind the drafts that it accepts, while this process still waits to know them."""
        count, chain = max(counts[row] for row in verified), self._program.chain
        if chain is None:
            return
        if count > self._num_tokens:
            if all(counts[row] > self._num_tokens for row in verified):
                self._grow_ahead(verified, count)
            return
        can_go_on = {row: one for row, one in verified.items() if self._can_go_on(row, one, count)}
        if 2 * len(can_go_on) < len(verified) or not can_go_on:
            return  # the others need a chain of their own
        verified = can_go_on
        ones = list(verified.values())
        rows = np.fromiter(verified, np.int32, len(verified))
        known = np.array([one.num_known for one in ones], np.int32)
        counts_of_lines = np.array([one.num_lines for one in ones], np.int32)
        of_place, positions = spread(known - 1, counts_of_lines)
        ids = np.zeros(len(positions), np.int32)
        batch = self._blocks.batch_of(self._rows, rows, known - 1, counts_of_lines, ids, self._num_tokens)
        of_rows = [self._drafted[row] for row in verified]
        self._sampler.admit_all(
            list(verified),
            [one.params for one in of_rows],
            [self._rows.tokens[row, : one.num_known] for row, one in verified.items()],
            [one.num_prompt for one in of_rows],
        )
        if chain.takes_verified(list(verified), count, batch.num_tokens):
            _, lines = spread(np.array([one.first_line for one in ones], np.int32), counts_of_lines)
            lengths = np.array([one.length for one in ones], np.int32)
            batch = replace(batch, hidden_rows=self._window_rows(rows[of_place], positions))
            verified_lines = VerifiedLines(lines, known, lengths)
            self._note_timed(chain.run(batch, list(verified), count, self._target_sampler, verified_lines))
            self._ahead |= verified
        self._sampler.retire_all(list(verified))

    def _can_go_on(self, row: int, verified: Verified, count: int) -> bool:
        """Whether all before is known and read, and there is room for as many drafts whatever is accepted. A chain does
        not go on behind a tree."""
        known = verified.num_known
        if row not in self._drafted or self._num_read[row] != known - 1:
            return False
        if row in self._trees and count <= self._num_tokens:
            return False
        is_known = bool(self._rows.tokens[row, known - 1] >= 0)
        most = max(verified.num_lines, 1 + self._num_tokens)
        return is_known and known + most + self._num_places(count) < self._max_length

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int] | DraftTree]:
        drafts: dict[int, list[int] | DraftTree] = {}
        for row, tokens in known.items():
            verified = self._ahead.pop(row, None)
            if verified and row in counts and verified.length in (-1, len(tokens)):
                self._num_unasked[row], self._num_read[row] = 0, len(tokens) - 1
                is_tree = counts[row] > self._num_tokens
                drafts[row] = self._unknown_tree(row, counts[row]) if is_tree else [UNKNOWN] * counts[row]
        others = {row: tokens for row, tokens in known.items() if row not in drafts}
        return drafts | super().propose(others, counts) if others else drafts

    def retire(self, row: int) -> None:
        super().retire(row)
        self._ahead.pop(row, None)
        self._grown.pop(row, None)

    def read_drafts(self, row: int, count: int) -> list[int]:
        assert self._program.chain is not None
        return self._program.chain.read_drafts(row, count, self._target_sampler)

    def take_steps(self) -> list[tuple[int, float]]:
        queued = [] if self._program.chain is None else self._program.chain.take_steps()
        self._queued_seconds = sum(seconds for _, seconds in queued)
        return super().take_steps() + queued

    def take_queued_seconds(self) -> float:
        return self._queued_seconds

    def take_untimed(self) -> bool:
        is_untimed = self._num_untimed > 0
        self._num_untimed = max(self._num_untimed - 1, 0)
        return is_untimed

    def _note_timed(self, is_timed: bool) -> None:
        """Of a chain that has been queued: this step launches it, and the device may run it in the next."""
        if not is_timed:
            self._num_untimed = 2

    def _draft_places(self, rows: Sequence[int], number: int) -> Int32:
        """The hidden states of that computed node of each row; 0: of the root, or of a chain."""
        return self._first_draft + np.array(rows, np.int32) * self._draft_rows + number

    # ---- trees

    def _draft_trees(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, DraftTree]:
        if self._program.chain is not None and self._program.chain.takes_trees:
            return self._draft_trees_at_once(texts, counts)
        trees = {row: ComputedTree() for row in texts}
        rows = list(texts)
        batch = self._unread(texts)
        lines = self._most_likely(self._program, batch, self._num_candidates(rows))
        for row, line in zip(rows, lines, strict=True):
            trees[row].add_level([ROOT], self._children(row, len(texts[row]), [line]))
        self._hidden.put(self._draft_places(rows, 0), self._program, batch.logit_rows)
        for level in range(1, self._num_tokens):
            rows = [row for row in rows if trees[row].compute(self._top_k)]
            if not rows:
                break
            batch = self._tree_batch({row: texts[row] for row in rows}, trees)
            lines = self._most_likely(self._program, batch, self._num_candidates(rows))
            for row in rows:
                nodes = [trees[row].computed[place] for place in trees[row].newest]
                of_row, lines = lines[: len(nodes)], lines[len(nodes) :]
                trees[row].add_level(nodes, self._children(row, len(texts[row]) + level, of_row))
            if level + 1 < self._num_tokens:
                places = [self._draft_places([row], 1 + place) for row in rows for place in trees[row].newest]
                self._hidden.put(np.concatenate(places), self._program, batch.logit_rows)
        return {row: tree.best(counts[row]) for row, tree in trees.items()}

    def _draft_trees_at_once(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, DraftTree]:
        """The same without the host: all levels are queued before the first is known."""
        rows, chain = list(texts), self._program.chain
        assert chain is not None
        batch = self._unread(texts, self._max_computed)
        self._timer.start()
        logits = self._program.run(batch)[: len(rows)]
        positions = np.array([len(texts[row]) - 1 for row in rows], np.int32)
        roots = self._roots(rows, positions, batch, self._num_tokens)
        shape = self._shape(rows, max(counts[row] for row in rows))
        keeper = TreeKeeper(self._target_sampler, rows) if self._takes_unknown(rows) else None
        arrive = chain.grow(logits, self._program.kept, roots, shape, keeper)
        self._timer.stop(self._top_k * len(rows), self._num_tokens)
        if keeper is not None:
            self._note_timed(False)
            self._note_grown(rows, arrive)
            return {row: self._unknown_tree(row, counts[row]) for row in rows}
        return {row: _first_nodes(tree, counts[row]) for row, tree in zip(rows, arrive(), strict=True)}

    def _grow_ahead(self, verified: Mapping[int, Verified], count: int) -> None:
        """As `propose_ahead`: a tree goes on behind the branch that the device accepts."""
        rows, ones, chain = list(verified), list(verified.values()), self._program.chain
        assert chain is not None
        can_go_on = all(one.length < 0 and self._can_go_on(row, one, count) for row, one in verified.items())
        if not can_go_on or not self._takes_unknown(rows):
            return
        known = np.array([one.num_known for one in ones], np.int32)
        lengths, max_depth = np.full(len(rows), 1 + self._num_tokens, np.int32), self._num_tokens
        ids = np.zeros(lengths.sum(), np.int32)
        of_rows = np.array(rows, np.int32)
        batch = self._blocks.batch_of(self._rows, of_rows, known - 1, lengths, ids, self._max_computed)
        roots = self._roots(rows, known, batch, self._num_tokens + max_depth)
        first_lines = np.array([one.first_line for one in ones], np.int32)
        runs = VerifiedRuns(first_lines, known, max_depth, self._window)
        keeper = TreeKeeper(self._target_sampler, rows)
        arrive, is_timed = chain.grow_behind(batch, roots, self._shape(rows, count), keeper, runs)
        self._note_timed(is_timed)
        self._note_grown(rows, arrive)
        self._ahead |= verified

    def _takes_unknown(self, rows: Sequence[int]) -> bool:
        """Whether the host need not know trees of these rows until they are verified."""
        chain = self._program.chain
        assert chain is not None
        is_few = len(rows) <= MAX_UNKNOWN_TREES and self._target.takes_trees
        return is_few and chain.takes_unknown_trees(rows, self._target_sampler)

    def _roots(self, rows: Sequence[int], positions: Int32, batch: StepBatch, num_keys: int) -> TreeRoots:
        """Trees behind these rows, whose first nodes have these positions."""
        of_rows = [self._drafted[row].params for row in rows]
        keys = [
            self._race_keys(one, position + 1, num_keys)
            for one, position in zip(of_rows, positions.tolist(), strict=True)
        ]
        temperatures = [0.0 if one.is_greedy else one.temperature for one in of_rows]
        given = batch.block_tables, batch.logit_rows, np.array(temperatures, np.float32), np.array(keys)
        return TreeRoots(positions, *given)

    def _shape(self, rows: Sequence[int], count: int) -> TreeShape:
        return TreeShape(self._num_tokens, self._top_k, self._num_children, self._num_candidates(rows), count)

    def _note_grown(self, rows: Sequence[int], arrive: Callable[[], list[GrownTree]]) -> None:
        self._grown |= {row: (arrive, number) for number, row in enumerate(rows)}

    def _unknown_tree(self, row: int, count: int) -> DraftTree:
        count = self._shape([row], count).num_found
        return DraftTree([UNKNOWN] * count, [UNKNOWN_PARENT] * count)

    def grown_tree(self, row: int) -> Callable[[], DraftTree] | None:
        if (grown := self._grown.get(row)) is None:
            return None
        arrive, number = grown
        return lambda: DraftTree(*arrive()[number])

    def _race_keys(self, params: RowParams, position: int, count: int) -> list[tuple[int, int]]:
        """Of the races that sample the tokens from there on, one a level."""
        positions = range(position, position + count)
        return [random_bits(params.seed, one, params.sample)[0] for one in positions]

    def _tree_batch(self, texts: Mapping[int, Int32], trees: Mapping[int, ComputedTree]) -> StepBatch:
        """The newest level of each tree."""
        pieces, hidden_rows, words, positions = {}, [], [], []
        for row, tokens in texts.items():
            tree, first = trees[row], len(tokens) - 1  # where the first draft is computed
            newest = slice(tree.newest.start, tree.newest.stop)
            nodes = [tree.tree.tokens[node] for node in tree.computed[newest]]
            pieces[row] = first + newest.start, np.array(nodes, np.int32)
            hidden_rows += [self._draft_places([row], 1 + parent) for parent in tree.parents[newest]]
            words += [word >> 1 for word in ancestor_words(tree.parents)[1:][newest]]  # the root is part of the text
            positions += [first - 1 + depth for depth in tree.depths[newest]]
        return replace(
            self._blocks.batch(self._rows, pieces),
            positions=np.array(positions, np.int32),
            logit_rows=np.arange(len(positions), dtype=np.int32),
            hidden_rows=np.concatenate(hidden_rows),
            ancestors=np.array(words, np.uint64).view(np.int64),
        )


def _first_nodes(tree: GrownTree, count: int) -> DraftTree:
    tokens, parents, confidences = tree
    return DraftTree(tokens[:count], without_chain(parents[:count]), confidences[:count])
