"""Drafts of a smaller model with the same vocabulary, which has keys and values of its own in the target's blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.core.plan import Admission, Run
from quire.ops.opset import Int32, StepBatch
from quire.ops.row_params import RowParams
from quire.runtime.kv import kv_spec
from quire.runtime.sampling import row_params
from quire.runtime.spec.draft_blocks import DraftBlocks
from quire.runtime.spec.proposer import Proposer, ProposerContext

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


class DraftModel(Proposer):
    """Computes what the target computes of prompts; then, for each row that has sampled, one draft after the other.

    Blocks have the ids of the target's, so prefixes, copies and swaps hold for both. Drafts that go past a row's blocks
    lie in blocks of the row's own, behind the target's."""

    def __init__(self, context: ProposerContext, num_tokens: int, draft_tensor_parallel_size: int = 1) -> None:
        assert context.draft is not None
        size, config = context.size, context.draft.config
        spec = kv_spec(config, size.spec.block_size, size.spec.dtype)
        self._num_tokens = num_tokens
        self._max_length = min(size.max_model_len, config.max_length)
        self._max_tokens = context.max_tokens
        self._blocks = DraftBlocks(size.num_blocks, spec.block_size, num_tokens)
        cache = context.ops.new_cache(spec, self._blocks.num_blocks(context.max_rows), size.num_host_blocks)
        self.caches = (cache,)
        self._sampler = context.ops.new_sampler(context.max_rows, config.vocab)
        self._program = context.ops.compile(
            context.draft.forward, cache, context.max_tokens, context.max_rows, size.max_model_len, self._sampler
        )
        self._drafted: dict[int, _DraftedRow] = {}

    def admit(self, admission: Admission) -> None:
        params = row_params(admission.params, admission.sample, admission.stop_ids)
        if admission.params.beam_width is None:  # which beams survive is not known
            self._drafted[admission.row] = _DraftedRow(replace(params, num_logprobs=-1), admission.num_prompt)

    def retire(self, row: int) -> None:
        self._drafted.pop(row, None)

    def follow(self, runs: Sequence[Run], batch: StepBatch) -> None:
        """Prompts are read chunk by chunk, as the target reads them; single tokens when drafts are proposed."""
        has_prompt = any(run.count - len(run.drafts) > 1 for run in runs)
        if has_prompt:
            self._program.run(replace(batch, logit_rows=NO_ROWS, adapters=None))
        for run in runs:
            if row := self._drafted.get(run.row):
                if row.num_computed < 0:
                    row.num_computed = run.start
                if has_prompt and row.num_computed >= run.start and not run.drafts:
                    row.num_computed = max(row.num_computed, run.start + run.count)

    def propose(self, known: Mapping[int, Int32]) -> dict[int, list[int]]:
        texts = {
            row: tokens
            for row, tokens in known.items()
            if row in self._drafted and len(tokens) + self._num_tokens < self._max_length
        }
        if not texts:
            return {}
        rows = list(texts)
        for row, tokens in texts.items():
            drafted = self._drafted[row]
            drafted.advance(tokens, int(self._rows.num_blocks[row]) * self._blocks.size)
            self._sampler.admit(row, drafted.params, tokens.tolist(), drafted.num_prompt)
        self._catch_up(texts)
        batch = self._batch({row: tokens[self._drafted[row].num_computed :] for row, tokens in texts.items()})
        for number in range(self._num_tokens):
            logits = self._program.run(batch)
            last = {}
            for one in self._sampler.draw(logits[: len(rows)], rows):
                if one.tokens:
                    self._drafted[one.row].drafts.append(one.tokens[0])
                    last[one.row] = one.tokens[0]
            rows = list(last)
            if not rows or number + 1 == self._num_tokens:
                break
            for row in rows:
                self._drafted[row].num_computed = self._drafted[row].num_known + number
            batch = self._batch({row: np.array([token], np.int32) for row, token in last.items()})
        for row in texts:
            self._sampler.retire(row)
            self._drafted[row].num_computed = min(self._drafted[row].num_known, self._drafted[row].num_slots)
        return {row: drafts for row in texts if (drafts := self._drafted[row].drafts)}

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
        return self._blocks.batch(
            self._rows, {row: (self._drafted[row].num_computed, ids) for row, ids in pieces.items()}
        )
