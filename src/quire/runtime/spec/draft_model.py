"""Drafts of a smaller model with the same vocabulary, which has keys and values of its own in the target's blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.core.plan import Run, StepPlan
from quire.ops.opset import Int32, ProgramSpec, StepBatch
from quire.ops.row_params import RowParams
from quire.runtime.kv import kv_spec
from quire.runtime.spec.draft_blocks import DraftBlocks
from quire.runtime.spec.drafting import DraftingProposer
from quire.runtime.spec.filled_blocks import FilledBlocks
from quire.runtime.spec.proposer import ProposerContext

NAME = "draft_model"
NO_ROWS = np.zeros(0, np.int32)


@dataclass(slots=True)
class _DraftedRow:
    """A sequence as the draft model knows it."""

    params: RowParams
    num_prompt: int
    num_computed: int = -1  # leading tokens whose keys and values it has; -1: not known before the first run
    # When drafts were proposed last:
    num_known: int = 0  # tokens
    num_slots: int = 0  # in the target's blocks: what is computed behind them is lost
    drafts: list[int] = field(default_factory=list)

    def advance(self, tokens: Int32, num_slots: int) -> None:
        """Drafts that became tokens are computed, but for the last."""
        sampled = tokens[self.num_known :].tolist()
        agreed = 0
        while agreed < min(len(self.drafts) - 1, len(sampled)) and self.drafts[agreed] == sampled[agreed]:
            agreed += 1
        if self.drafts:
            self.num_computed = min(self.num_known + agreed, self.num_slots)
        self.num_computed = min(self.num_computed, len(tokens) - 1)
        self.num_known, self.num_slots, self.drafts = len(tokens), num_slots, []


class DraftModel(DraftingProposer[_DraftedRow]):
    """Computes what the target computes of prompts, where drafts are wanted; then one draft after the other for each
    row, as many as are wanted.

    Blocks have the ids of the target's, so prefixes, copies and swaps hold for both. Drafts that go past a row's blocks
    lie in blocks of the row's own, behind the target's."""

    def __init__(
        self, context: ProposerContext, num_tokens: int, draft_tensor_parallel_size: int = 1, max_model_len: int = 0
    ) -> None:
        """`max_model_len`: longer texts get no drafts; 0: as long as the model can read."""
        assert context.draft is not None
        size, config = context.size, context.draft.config
        super().__init__(context, config.vocab)
        spec = kv_spec(config, size.spec.block_size, size.spec.dtype)
        self._max_length = min(size.max_model_len, config.max_length, max_model_len or config.max_length)
        self._max_tokens = context.max_tokens
        self._blocks = DraftBlocks(size.num_blocks, spec.block_size, num_tokens)
        cache = context.ops.new_cache(spec, self._blocks.num_blocks(context.max_rows), size.num_host_blocks)
        self.caches = (cache,)
        self._program = context.ops.compile(
            context.draft.forward,
            cache,
            ProgramSpec(context.max_tokens, context.max_rows, size.max_model_len, self._sampler),
        )
        self._begun: set[int] = set()  # rows that had a run
        self._filled = FilledBlocks(size.num_blocks, size.num_host_blocks, spec.block_size)

    def _new_row(self, params: RowParams, num_prompt: int) -> _DraftedRow:
        return _DraftedRow(params, num_prompt)

    def retire(self, row: int) -> None:
        super().retire(row)
        self._begun.discard(row)

    def move_blocks(self, plan: StepPlan) -> None:
        self._filled.move(plan)

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        """Prompts are read chunk by chunk, as the target reads them, if drafts will be wanted; single tokens, and
        prompts that were not read, when drafts are proposed."""
        has_prompt = any(run.count - len(run.drafts) > 1 and NAME in run.quotas for run in runs)
        if has_prompt:
            self._program.run(replace(batch, logit_rows=NO_ROWS, adapters=None, ancestors=None))
        for run in runs:
            row = self._drafted.get(run.row)
            if run.row not in self._begun:
                self._begun.add(run.row)
                num_filled = self._filled.begin(self._table(run.row), run.start)
                if row:
                    row.num_computed = num_filled
            else:
                self._filled.clear(run.new_blocks)
            if row and has_prompt and row.num_computed >= run.start and not run.drafts:
                row.num_computed = max(row.num_computed, run.start + run.count)
                self._filled.fill(self._table(run.row), row.num_computed)

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, list[int]]:
        texts = self._texts(known, counts)
        if not texts:
            return {}
        rows = list(texts)
        for row, tokens in texts.items():
            drafted = self._drafted[row]
            drafted.advance(tokens, int(self._rows.num_blocks[row]) * self._blocks.size)
            self._sampler.admit(row, drafted.params, tokens.tolist(), drafted.num_prompt)
        self._catch_up(texts)
        batch = self._batch({row: tokens[self._drafted[row].num_computed :] for row, tokens in texts.items()})
        for number in range(max(counts[row] for row in rows)):
            last = self._draw(self._program, batch, rows)
            for row, token in last.items():
                self._drafted[row].drafts.append(token)
            rows = [row for row in last if counts[row] > number + 1]
            if not rows:
                break
            for row in rows:
                self._drafted[row].num_computed = self._drafted[row].num_known + number
            batch = self._batch({row: np.array([last[row]], np.int32) for row in rows})
        for row in texts:
            drafted = self._drafted[row]
            self._sampler.retire(row)
            drafted.num_computed = min(drafted.num_known, drafted.num_slots)
            self._filled.fill(self._table(row), drafted.num_computed)
        return {row: drafts for row in texts if (drafts := self._drafted[row].drafts)}

    def _table(self, row: int) -> Int32:
        """The target's blocks."""
        table: Int32 = self._rows.tables[row, : self._rows.num_blocks[row]]
        return table

    def _catch_up(self, texts: Mapping[int, Int32]) -> None:
        """Compute what is missing before the last token, where it is more than fits in a step together."""
        missing = sum(len(tokens) - self._drafted[row].num_computed for row, tokens in texts.items())
        if missing <= self._max_tokens:
            return
        for row, tokens in texts.items():
            drafted = self._drafted[row]
            while drafted.num_computed < len(tokens) - 1:
                piece = tokens[drafted.num_computed : min(drafted.num_computed + self._max_tokens, len(tokens) - 1)]
                self._program.run(replace(self._batch({row: piece}), logit_rows=NO_ROWS))
                drafted.num_computed += len(piece)

    def _batch(self, pieces: Mapping[int, Int32]) -> StepBatch:
        """Tokens by row that follow its computed ones; logits are those after the last of each."""
        starting = {row: (self._drafted[row].num_computed, ids) for row, ids in pieces.items()}
        return self._blocks.batch(self._rows, starting)
