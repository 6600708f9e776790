"""Carries out plans: a `StepPlan` becomes arrays, a forward pass, and drawn tokens."""

from collections.abc import Iterable
from typing import Any

from quire.core.plan import Drawn, StepOutput, StepPlan
from quire.core.request import Logprob
from quire.models.loading import Model
from quire.ops.opset import BROKEN, CANDIDATES, Draw, OpSet
from quire.runtime.batch import Rows, Step
from quire.runtime.kv import KVSize
from quire.runtime.sampling import row_params


class Runner:
    """One model on one device. It keeps what plans do not repeat: each row's tokens, blocks and parameters."""

    def __init__(self, ops: OpSet, model: Model, size: KVSize, *, max_rows: int, max_tokens: int) -> None:
        self.rows = Rows(max_rows, size.max_model_len, size.spec.block_size)
        self.cache = ops.new_cache(size.spec, size.num_blocks, size.num_host_blocks)
        self.sampler = ops.new_sampler(max_rows, model.config.vocab)
        self.program = ops.compile(model.forward, self.cache, max_tokens, max_rows, size.max_model_len)
        self._prompt_logprobs: dict[int, int] = {}  # row -> alternatives wanted beside each prompt token

    def run(self, plan: StepPlan) -> StepOutput:
        self._prepare(plan)
        if not plan.runs:
            return StepOutput(plan.step, [])
        step = self.rows.step(plan.runs)
        logits = self.program.run(step.batch)
        return StepOutput(plan.step, self._draw(step, logits))

    def _prepare(self, plan: StepPlan) -> None:
        """All of the plan but its runs, in the order that plans promise."""
        for row in plan.retired:
            self.rows.retire(row)
            self.sampler.retire(row)
            self._prompt_logprobs.pop(row, None)
        if plan.swap_out:
            self.cache.swap_out(plan.swap_out)
        if plan.swap_in:
            self.cache.swap_in(plan.swap_in)
        if plan.copies:
            self.cache.copy(plan.copies)
        for admission in plan.admitted:
            self.rows.admit(admission)
            self.sampler.admit(admission.row, row_params(admission), admission.tokens, admission.num_prompt)
            if admission.params.prompt_logprobs is not None:
                self._prompt_logprobs[admission.row] = admission.params.prompt_logprobs

    def _draw(self, step: Step, logits: Any) -> list[Drawn]:
        rows = step.drawing.tolist()
        drawn: dict[int, Drawn] = {}
        if rows:
            draws = self.sampler.draw(logits[: len(rows)], rows)
            for row, draw in zip(rows, draws, strict=True):
                drawn[row] = _drawn(row, draw)
                if draw.token >= 0:  # beams grow when the scheduler has chosen among them
                    self.rows.append(row, draw.token)
        for row, lines, targets in step.scored:
            found = self.sampler.logprobs(logits[lines], targets, self._prompt_logprobs[row])
            drawn.setdefault(row, Drawn(row)).prompt_logprobs = [_logprobs(line) for line in found]
        return list(drawn.values())


def _drawn(row: int, draw: Draw) -> Drawn:
    if draw.token == BROKEN:
        return Drawn(row, error="the model gave no number for any token that may follow")
    if draw.token == CANDIDATES:
        return Drawn(row, beams=_logprobs(draw.logprobs))
    return Drawn(row, [draw.token], [_logprobs(draw.logprobs)] if draw.logprobs else None)


def _logprobs(found: Iterable[tuple[int, float, int]]) -> list[Logprob]:
    return [Logprob(token, logprob, rank) for token, logprob, rank in found]
