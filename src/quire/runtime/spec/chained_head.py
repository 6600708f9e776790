"""Drafts of a head with a decoder layer (EAGLE, EAGLE-3, MTP): one after the other, each from the head's own hidden
state of the one before."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from quire.core.plan import Run
from quire.ops.opset import Int32, StepBatch
from quire.runtime.kv import kv_spec
from quire.runtime.spec.draft_blocks import DraftBlocks
from quire.runtime.spec.head import HeadProposer
from quire.runtime.spec.proposer import ProposerContext

NO_ROWS = np.zeros(0, np.int32)


class ChainedHead(HeadProposer):
    """Position p of its cache is made of the target's hidden state of position p and of token p + 1, and gives token
    p + 2. Positions behind a draft are computed anew when the target has verified it."""

    def __init__(self, context: ProposerContext, num_tokens: int, draft_tensor_parallel_size: int = 1) -> None:
        super().__init__(context, num_tokens)
        size, config = context.size, self._head.config
        assert config is not None
        self._max_length = min(self._max_length, config.max_length)
        self._blocks = DraftBlocks(size.num_blocks, size.spec.block_size, num_tokens)
        spec = kv_spec(config, size.spec.block_size, size.spec.dtype)
        cache = context.ops.new_cache(spec, self._blocks.num_blocks(context.max_rows), size.num_host_blocks)
        self.caches = (cache,)
        (forward,) = self._head.forwards
        max_tokens = context.max_tokens + self._first_draft  # the tokens of a step, and those kept before
        self._program = context.ops.compile(
            forward, cache, max_tokens, context.max_rows, size.max_model_len, self._sampler, hidden=self._hidden
        )

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        """Prompts are read chunk by chunk, as the target reads them; what was sampled when drafts are proposed, or when
        no more can be kept."""
        self._make_room(runs)
        super().follow(runs, batch)
        pieces: dict[int, tuple[int, Int32]] = {}
        lines = []
        for run, first in zip(runs, batch.seq_starts.tolist(), strict=False):
            if row := self._drafted.get(run.row):
                if row.num_read < 0:
                    row.num_read = run.start
                if count := self._num_readable(run):
                    pieces[run.row] = run.start, self._rows.tokens[run.row, run.start + 1 : run.start + 1 + count]
                    lines.append(np.arange(first, first + count, dtype=np.int32))
                    row.num_read = run.start + count
        if pieces:
            places = self._first_token + np.arange(sum(map(len, lines)), dtype=np.int32)
            self._hidden.put(places, self._target, np.concatenate(lines))
            self._read(pieces, places)

    def _num_readable(self, run: Run) -> int:
        """Leading positions of a run that have a known token behind them, if they are more than are kept."""
        if not self._samples(run):
            return run.count
        return run.count - 1 if run.count > self._window else 0

    def _make_room(self, runs: Sequence[Run]) -> None:
        """Read positions that no drafts were proposed for, before their hidden states are overwritten. (The token at
        the start of a run may not be known yet, so the position before it stays.)"""
        pieces: dict[int, tuple[int, Int32]] = {}
        places = []
        for run in runs:
            row = self._drafted.get(run.row)
            if row and 0 <= row.num_read < run.start - 1 and run.start + run.count - row.num_read > self._window:
                pieces[run.row] = row.num_read, self._rows.tokens[run.row, row.num_read + 1 : run.start]
                places.append(self._rows_of(run.row, np.arange(row.num_read, run.start - 1, dtype=np.int32)))
                row.num_read = run.start - 1
        if pieces:
            self._read(pieces, np.concatenate(places))

    def _read(self, pieces: Mapping[int, tuple[int, Int32]], places: Int32) -> None:
        """Compute keys and values of these positions; their hidden states are in those places."""
        self._program.run(replace(self._blocks.batch(self._rows, pieces), logit_rows=NO_ROWS, hidden_rows=places))

    def _draft(self, texts: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {row: [] for row in texts}
        batch = self._unread(texts)
        rows, tables = list(texts), batch.block_tables
        for number in range(max(counts[row] for row in rows)):
            before = {row: line for line, row in enumerate(rows)}
            rows = [row for row in self._draw(self._program, batch, rows, drafts) if counts[row] > number + 1]
            if not rows:
                break
            kept = [before[row] for row in rows]
            places = self._first_draft + np.array(rows, np.int32)
            self._hidden.put(places, self._program, batch.logit_rows[kept])
            tables = tables[kept]
            positions = np.array([len(texts[row]) - 1 + number for row in rows], np.int32)
            ids = np.array([drafts[row][-1] for row in rows], np.int32)
            batch = replace(self._blocks.next(tables, positions, ids), hidden_rows=places)
        return drafts

    def _unread(self, texts: Mapping[int, Int32]) -> StepBatch:
        """The positions of each row that the head has not read, up to the one before the last token."""
        pieces, places = {}, []
        for row, tokens in texts.items():
            first = self._drafted[row].num_read
            pieces[row] = first, tokens[first + 1 :]
            places.append(self._rows_of(row, np.arange(first, len(tokens) - 1, dtype=np.int32)))
            self._drafted[row].num_read = len(tokens) - 1
        batch = self._blocks.batch(self._rows, pieces, ahead=self._num_tokens)
        return replace(batch, hidden_rows=np.concatenate(places))
