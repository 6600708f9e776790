"""Methods that draft with weights of their own: a smaller model, or a head."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp, inf
from typing import Generic, TypeVar

from quire.core.plan import Admission
from quire.ops.opset import Int32, Program, StepBatch
from quire.ops.row_params import RowParams
from quire.runtime.sampling import row_params
from quire.runtime.spec.proposer import Proposer, ProposerContext

DraftedRow = TypeVar("DraftedRow")
Result = TypeVar("Result")
Candidates = list[tuple[int, float]]  # tokens and their probabilities


class DraftingProposer(Proposer, Generic[DraftedRow]):
    """Draws drafts with each request's own parameters and random numbers, and reports what its steps take."""

    def __init__(self, context: ProposerContext, vocab: int) -> None:
        self._max_length = context.size.max_model_len  # longer texts get no drafts
        self._sampler = context.ops.new_sampler(context.max_rows, vocab)
        self._drafted: dict[int, DraftedRow] = {}
        self._steps: list[tuple[int, float]] = []  # (tokens, seconds)
        self._drawn = 0.0  # time.perf_counter() of the last draft that was waited for

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
        steps, self._steps = self._steps, []
        return steps

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
        return self._begin(program, batch, rows)()

    def _begin(self, program: Program, batch: StepBatch, rows: Sequence[int]) -> Callable[[], dict[int, int]]:
        """The same without waiting, where the sampler does not wait."""
        wait = self._timed(self._sampler.begin(program.run(batch)[: len(rows)], rows), len(batch.ids))
        return lambda: {one.row: one.tokens[0] for one in wait() if one.tokens}

    def _timed(self, wait: Callable[[], Result], num_tokens: int, num_steps: int = 1) -> Callable[[], Result]:
        """Note what the steps take that have just been queued, each of so many tokens."""
        begin = time.perf_counter()

        def done() -> Result:
            result = wait()
            seconds = time.perf_counter() - max(begin, self._drawn)
            self._steps += [(num_tokens, seconds / num_steps)] * num_steps
            self._drawn = time.perf_counter()
            return result

        return done

    def _most_likely(self, program: Program, batch: StepBatch, count: int) -> list[Candidates]:
        """One step: for each line of logits, the most likely tokens."""
        begin = time.perf_counter()
        num_lines = len(batch.logit_rows)
        lines = self._sampler.logprobs(program.run(batch)[:num_lines], [0] * num_lines, count)
        self._steps.append((len(batch.ids), time.perf_counter() - begin))
        return [[(id, exp(logprob)) for id, logprob, _ in line[1:] if logprob > -inf] for line in lines]
