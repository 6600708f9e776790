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
        """Prompts are read chunk by chunk, as the target reads them; what was sampled when drafts are proposed."""
        super().follow(runs, batch)
        pieces: dict[int, tuple[int, Int32]] = {}
        lines = []
        for run, first in zip(runs, batch.seq_starts.tolist(), strict=False):
            if row := self._drafted.get(run.row):
                if row.num_read < 0:
                    row.num_read = run.start
                if count := self._num_readable(run):
                    next_tokens = self._rows.tokens[run.row, run.start + 1 : run.start + 1 + count]
                    pieces[run.row] = run.start, next_tokens
                    lines.append(np.arange(first, first + count, dtype=np.int32))
                    row.num_read = run.start + count
        if pieces:
            places = self._first_token + np.arange(sum(map(len, lines)), dtype=np.int32)
            self._hidden.put(places, self._target, np.concatenate(lines))
            self._program.run(replace(self._blocks.batch(self._rows, pieces), logit_rows=NO_ROWS, hidden_rows=places))

    def _num_readable(self, run: Run) -> int:
        """Leading positions of a run that have a known token behind them, if they are more than are kept."""
        if not self._samples(run):
            return run.count
        return run.count - 1 if run.count > self._window else 0

    def _draft(self, texts: Mapping[int, Int32]) -> dict[int, list[int]]:
        drafts: dict[int, list[int]] = {row: [] for row in texts}
        rows = list(texts)
        batch = self._unread(texts)
        for number in range(self._num_tokens):
            logits = self._program.run(batch)
            lines = dict(zip(rows, batch.logit_rows.tolist(), strict=True))
            rows = self._draw(logits, rows, drafts)
            if not rows or number + 1 == self._num_tokens:
                break
            places = self._first_draft + np.array(rows, np.int32)
            self._hidden.put(places, self._program, np.array([lines[row] for row in rows], np.int32))
            pieces = {row: (len(texts[row]) - 1 + number, np.array(drafts[row][-1:], np.int32)) for row in rows}
            batch = replace(self._blocks.batch(self._rows, pieces), hidden_rows=places)
        return drafts

    def _unread(self, texts: Mapping[int, Int32]) -> StepBatch:
        """The positions of each row that the head has not read, up to the one before the last token."""
        pieces, places = {}, []
        for row, tokens in texts.items():
            first = self._drafted[row].num_read
            pieces[row] = first, tokens[first + 1 :]
            places.append(self._rows_of(row, np.arange(first, len(tokens) - 1, dtype=np.int32)))
            self._drafted[row].num_read = len(tokens) - 1
        return replace(self._blocks.batch(self._rows, pieces), hidden_rows=np.concatenate(places))
