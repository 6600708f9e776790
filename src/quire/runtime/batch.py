"""The tokens and block tables of each row, and how the runs of a step become flat arrays.

They are arrays of a fixed size, one line a row, so that one native call assembles a step: between two steps of a small
model there is little time for Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from quire.core.draft_tree import accepted_path, ancestor_words, depths, is_unknown
from quire.core.plan import UNKNOWN, Admission, Run
from quire.ops.compiled import native
from quire.ops.opset import WORD_BITS, Int32, Int64, StepBatch

CAUSAL_WORDS: Int64 = np.array([(2 << token) - 1 for token in range(WORD_BITS)], np.uint64).view(np.int64)


@dataclass(slots=True)
class BatchedStep:
    """The arrays of a step, and which rows its lines of logits belong to: a line for each row that samples, then
    lines of prompts. A row with draft tokens has one more line for each of them, side by side."""

    batch: StepBatch
    sampling: Int32  # [D] rows, in the order of their lines
    drafts: dict[int, list[int]]  # ids by row; a row without drafts is not a key
    parents: dict[int, list[int]]  # of drafts that are a tree, by row; UNKNOWN_PARENT until it is verified
    scored: list[tuple[int, slice, list[int]]]  # (row, its lines of the logits, the prompt token that followed each)


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows sample: the position of the first token, and how often the row was retired before."""

    rows: Int32  # [D], as the others
    positions: Int32
    num_drafts: Int32  # drafts that were computed behind the token
    tenancies: Int32


class BatchRows:
    """Tokens and block tables of the sequences that hold a row."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # The token sampled at the last position is known and never computed: hence one column more.
        self.tokens = np.zeros((num_rows, max_model_len + 1), np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.tables = np.zeros((num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.adapters = np.full(num_rows, -1, np.int32)  # slots
        self._scored: set[int] = set()  # rows that want logprobs of their prompt
        self._num_adapted = 0  # rows that have an adapter
        self._tenancies = np.zeros(num_rows, np.int32)  # how often the row was retired

    def admit(self, admission: Admission) -> None:
        row, tokens, blocks = admission.row, admission.tokens, admission.blocks
        assert self.num_known[row] == 0, f"row {row} is taken"
        self.tokens[row, : len(tokens)] = tokens
        self.num_known[row] = len(tokens)
        self.num_prompt[row] = admission.num_prompt
        self.tables[row, : len(blocks)] = blocks
        self.num_blocks[row] = len(blocks)
        self.adapters[row] = admission.adapter
        self._num_adapted += admission.adapter >= 0
        if admission.params.prompt_logprobs is not None:
            self._scored.add(row)

    def retire(self, row: int) -> None:
        self._num_adapted -= int(self.adapters[row] >= 0)
        self.adapters[row] = -1
        self.num_known[row] = self.num_blocks[row] = 0
        self._tenancies[row] += 1
        self._scored.discard(row)

    def expect(self, rows: Int32, num_drafts: Int32) -> Places:
        """What these rows sample is known to the device alone. A row without drafts has one more token: ~row stands for
        it. Of the others the drafts, which have been computed, are removed: some of them may come back."""
        known, is_single = self.num_known[rows] - num_drafts, num_drafts == 0
        single = rows[is_single]
        self.tokens[single, known[is_single]] = ~single
        self.num_known[rows] = known + is_single
        return Places(rows, known, num_drafts, self._tenancies[rows])

    def settle(self, places: Places, sampled: Sequence[Sequence[int]]) -> None:
        """The tokens that were sampled in each place; none where sampling failed. Blocks behind the last computed token
        of a row with drafts are given back. A row that was retired meanwhile stays as it is."""
        counts = np.fromiter(map(len, sampled), np.int32, len(sampled))
        tokens = np.fromiter(chain.from_iterable(sampled), np.int32, int(counts.sum()))
        held = self.held(places)
        ends = places.positions + counts
        columns = np.arange(len(tokens)) + np.repeat(ends - np.cumsum(counts), counts)
        of_held = np.repeat(held, counts)
        self.tokens[np.repeat(places.rows, counts)[of_held], columns[of_held]] = tokens[of_held]
        drafted = held & (places.num_drafts > 0)
        changed = drafted | (held & (counts == 0))
        self.num_known[places.rows[changed]] = ends[changed]
        self.num_blocks[places.rows[drafted]] = -(-(ends[drafted] - 1) // self.block_size)

    def held(self, places: Places) -> NDArray[np.bool_]:
        """Which rows still belong to the sequences that had these places."""
        of_rows: NDArray[np.bool_] = self._tenancies[places.rows] == places.tenancies
        return of_rows

    def known(self, places: Places, sampled: Sequence[Sequence[int]]) -> dict[int, Int32]:
        """By row, all tokens up to those sampled there. Rows that are not held or sampled nothing are left out."""
        return {
            row: self.tokens[row, : position + len(tokens)]
            for row, position, tokens, is_held in zip(
                places.rows.tolist(), places.positions.tolist(), sampled, self.held(places).tolist(), strict=True
            )
            if tokens and is_held
        }

    def moved_slots(
        self, row: int, position: int, drafts: Sequence[int], parents: Sequence[int], tokens: Sequence[int]
    ) -> list[tuple[int, int]]:
        """In a tree of drafts from that place on, the slots of the accepted ones: (where they are, where a chain has
        them). Before `settle`."""
        path = accepted_path(drafts, parents, tokens)
        return [
            (self._slot(row, position + node), self._slot(row, position + depth))
            for depth, node in enumerate(path)
            if node != depth
        ]

    def _slot(self, row: int, place: int) -> int:
        return int(self.tables[row, place // self.block_size]) * self.block_size + place % self.block_size

    def _append_drafts(self, runs: Sequence[Run]) -> dict[int, list[int]]:
        """Let the draft tokens of these runs follow what is known, until `expect`. -> their ids by row: of one that is
        UNKNOWN, the complement of where the sampler keeps it"""
        counts = np.fromiter((len(run.drafts) for run in runs), np.int32, len(runs))
        rows = np.fromiter((run.row for run in runs), np.int32, len(runs))
        drafts = np.fromiter(chain.from_iterable(run.drafts for run in runs), np.int32, int(counts.sum()))
        ends = np.cumsum(counts)
        places = np.arange(len(drafts), dtype=np.int32) - np.repeat(ends - counts, counts).astype(np.int32)
        of_drafts = np.repeat(rows, counts)
        ids = np.where(drafts == UNKNOWN, ~(of_drafts + (places + 1) * len(self.num_known)), drafts)
        self.tokens[of_drafts, self.num_known[of_drafts] + places] = ids
        self.num_known[rows] += counts
        listed = ids.tolist()
        return {run.row: listed[end - len(run.drafts) : end] for run, end in zip(runs, ends.tolist(), strict=True)}

    def step(self, runs: Sequence[Run]) -> BatchedStep:
        for run in runs:
            if run.new_blocks:
                self._grow(run.row, run.new_blocks)
        drafted = [run for run in runs if run.drafts]
        drafts = self._append_drafts(drafted) if drafted else {}
        parents = {run.row: list(run.parents) for run in drafted if run.parents}
        ids, positions, slots, seq_starts, context_lens, block_tables, logit_rows, sampling = native.assemble(
            self.tokens,
            self.tables,
            self.num_known,
            self.num_blocks,
            self.block_size,
            [(run.row, run.start, run.count) for run in runs],
        )
        if drafts:
            logit_rows = _with_drafts(logit_rows, [len(drafts.get(row, ())) for row in sampling.tolist()])
        scored: list[tuple[int, slice, list[int]]] = []
        if self._scored:
            scored, scored_tokens = self._score(runs, seq_starts, len(logit_rows))
            logit_rows = np.concatenate([logit_rows, *scored_tokens])
        adapters = self._adapters(runs) if self._num_adapted else None
        batch = StepBatch(ids, positions, slots, seq_starts, context_lens, block_tables, logit_rows, adapters)
        if parents:
            batch.ancestors = _branch(batch, runs)
        if runs and runs[0].states:
            batch.states = _segments(runs, seq_starts)
        return BatchedStep(batch, sampling, drafts, parents, scored)

    def _adapters(self, runs: Sequence[Run]) -> Int32 | None:
        """The adapter slot of each token; None if no token of the step has one."""
        slots = self.adapters[[run.row for run in runs]]
        return np.repeat(slots, [run.count for run in runs]) if (slots >= 0).any() else None

    def _grow(self, row: int, blocks: list[int]) -> None:
        held = self.num_blocks[row]
        self.tables[row, held : held + len(blocks)] = blocks
        self.num_blocks[row] = held + len(blocks)

    def _score(
        self, runs: Sequence[Run], seq_starts: Int32, line: int
    ) -> tuple[list[tuple[int, slice, list[int]]], list[Int32]]:
        """Which tokens of the step have a prompt token after them; their logits are lines `line` and following."""
        scored, tokens = [], []
        for run, first in zip(runs, seq_starts.tolist(), strict=False):
            count = min(run.count, int(self.num_prompt[run.row]) - 1 - run.start)
            if run.row not in self._scored or count <= 0:
                continue
            targets = self.tokens[run.row, run.start + 1 : run.start + 1 + count].tolist()
            scored.append((run.row, slice(line, line + count), targets))
            tokens.append(np.arange(first, first + count, dtype=np.int32))
            line += count
        return scored, tokens


def _segments(runs: Sequence[Run], seq_starts: Int32) -> Int32:
    """Where the tokens of a step start from states and leave them: (end, source, target) each."""
    segments = []
    for run, first in zip(runs, seq_starts.tolist(), strict=False):
        source = run.state
        for position, target in run.states:
            segments.append((first + position - run.start, source, target))
            source = target
    return np.array(segments, np.int32)


def _branch(batch: StepBatch, runs: Sequence[Run]) -> Int64:
    """Let the drafts of trees stand at the positions of their depths. -> what each token of the step sees. Drafts of a
    tree that only the device knows stand at the position of its root, and have no word."""
    words = np.zeros(batch.num_tokens, np.int64)
    for run, first in zip(runs, batch.seq_starts.tolist(), strict=False):
        tokens = slice(first, first + run.count)
        if run.count <= WORD_BITS:
            words[tokens] = CAUSAL_WORDS[: run.count]
        if run.parents:
            assert run.count <= WORD_BITS, f"a run of {run.count} tokens has a tree, and {WORD_BITS} is possible"
            num_known = run.count - len(run.drafts)
            last = first + num_known - 1  # the root
            if is_unknown(run.parents):
                assert num_known == 1, f"a tree that is not known follows {num_known} tokens of a run"
                batch.positions[last + 1 : first + run.count], words[tokens][1:] = batch.positions[last], 0
                continue
            batch.positions[last + 1 : first + run.count] = batch.positions[last] + np.array(depths(run.parents))
            of_tree = np.array(ancestor_words(run.parents), np.uint64) << np.uint64(num_known - 1)
            words[tokens][num_known - 1 :] = (of_tree | np.uint64((1 << num_known) - 1)).view(np.int64)
    return words


def _with_drafts(logit_rows: Int32, counts: list[int]) -> Int32:
    """Each of these tokens, preceded by the counts[i] tokens before it."""
    widths = np.array(counts, np.int32) + 1
    ends = np.cumsum(widths, dtype=np.int32)
    return np.arange(ends[-1], dtype=np.int32) + np.repeat(logit_rows + 1 - ends, widths)
