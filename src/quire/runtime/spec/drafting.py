"""Methods that draft with weights of their own: a smaller model, or a head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import exp, inf
from typing import Generic, TypeVar

from quire.core.plan import Admission
from quire.ops.opset import Int32, Program, StepBatch
from quire.ops.row_params import RowParams
from quire.runtime.sampling import row_params
from quire.runtime.spec.proposer import Proposer, ProposerContext

DraftedRow = TypeVar("DraftedRow")
Candidates = list[tuple[int, float]]  # tokens and their probabilities


class DraftingProposer(Proposer, Generic[DraftedRow]):
    """Draws drafts with each request's own parameters and random numbers, and reports what its steps take."""

    def __init__(self, context: ProposerContext, vocab: int) -> None:
        self._max_length = context.size.max_model_len  # longer texts get no drafts
        self._sampler = context.ops.new_sampler(context.max_rows, vocab)
        self._drafted: dict[int, DraftedRow] = {}
        self._timer = context.ops.new_timer()

    def admit(self, admission: Admission) -> None:
        params = row_params(admission.params, admission.sample, admission.stop_ids)
        if admission.params.beam_width is None:  # which beams survive is not known
            self._drafted[admission.row] = self._new_row(replace(params, num_logprobs=-1), admission.num_prompt)

    def _new_row(self, params: RowParams, num_prompt: int) -> DraftedRow:
        """What is kept of a sequence that gets drafts."""
        raise NotImplementedError

    def retire(self, row: int) -> None:
        self._drafted.pop(row, None)

    def take_steps(self) -> list[tuple[int, float]]:
        return self._timer.take()

    def _texts(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, Int32]:
        """The rows that get drafts: those that have room behind their text."""
        return {
            row: tokens
            for row, tokens in known.items()
            if row in self._drafted and len(tokens) + self._num_places(counts[row]) < self._max_length
        }

    def _num_places(self, count: int) -> int:
        """Behind a text, what so many drafts take in the method's own cache."""
        return count

    def _draw(self, program: Program, batch: StepBatch, rows: Sequence[int]) -> dict[int, int]:
        """One step: the next draft of each row that has one. Steps that only read are not timed: on a GPU they are
        queued, and not awaited."""
        self._timer.start()
        drawn = self._sampler.begin(program.run(batch)[: len(rows)], rows)()
        self._timer.stop(len(batch.ids))
        return {one.row: one.tokens[0] for one in drawn if one.tokens}

    def _most_likely(self, program: Program, batch: StepBatch, count: int) -> list[Candidates]:
        """One step: for each line of logits, the most likely tokens."""
        num_lines = len(batch.logit_rows)
        self._timer.start()
        lines = self._sampler.logprobs(program.run(batch)[:num_lines], [0] * num_lines, count)
        self._timer.stop(len(batch.ids))
        return [[(id, exp(logprob)) for id, logprob, _ in line[1:] if logprob > -inf] for line in lines]
