"""Carries out plans: a `StepPlan` becomes arrays, a forward pass, and drawn tokens."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from quire.core.plan import Drawn, StepOutput, StepPlan
from quire.core.request import Logprob
from quire.models.config import Seq2SeqConfig
from quire.models.loading import Model
from quire.ops.opset import BROKEN, CANDIDATES, Draw, KVCache, OpSet
from quire.runtime.adapters import Adapters
from quire.runtime.batch import Rows, Step
from quire.runtime.guides import Guides, Matchers
from quire.runtime.kv import KVSize
from quire.runtime.sampling import row_params
from quire.runtime.sources import Sources


class Runner:
    """One model on one device. It keeps what plans do not repeat: each row's tokens, blocks and parameters.

    `submit` returns when the device knows what to do, `collect` when the oldest step submitted is done. A plan may be
    submitted before the tokens it goes on from are known here, if the device draws them."""

    def __init__(
        self,
        ops: OpSet,
        model: Model,
        size: KVSize,
        *,
        max_rows: int,
        max_tokens: int,
        adapters: Adapters | None = None,
    ) -> None:
        """`adapters` are those of the model, where plans may ask for some."""
        self.rows = Rows(max_rows, size.max_model_len, size.spec.block_size)
        self.cache = ops.new_cache(size.spec, size.num_blocks, size.num_host_blocks)
        self.sampler = ops.new_sampler(max_rows, model.config.vocab)
        self.adapters = adapters
        forward = model.forward if adapters is None else adapters.forward
        sources = model.encode is not None
        self.program = ops.compile(
            forward, self.cache, max_tokens, max_rows, size.max_model_len, self.sampler, sources=sources
        )
        self.sources = _sources(ops, model, self.cache, size, max_rows, max_tokens)
        self.guides: Guides | None = None
        self._vocab = model.config.vocab
        self._prompt_logprobs: dict[int, int] = {}  # row -> alternatives wanted beside each prompt token
        self._under_way: deque[tuple[int, Callable[[], list[Drawn]]]] = deque()  # steps, and how to get what they drew

    def guide(self, matchers: Matchers) -> None:
        """From now on, rows may ask for answers in a language."""
        self.guides = Guides(self._vocab, matchers)

    def submit(self, plan: StepPlan) -> None:
        self._prepare(plan)
        self._under_way.append((plan.step, self._launch(plan) if plan.runs else list))

    def collect(self) -> StepOutput:
        step, finish = self._under_way.popleft()
        return StepOutput(step, finish())

    def run(self, plan: StepPlan) -> StepOutput:
        self.submit(plan)
        return self.collect()

    def _prepare(self, plan: StepPlan) -> None:
        """All of the plan but its runs, in the order that plans promise."""
        for row in plan.retired:
            self.rows.retire(row)
            self.sampler.retire(row)
            self._prompt_logprobs.pop(row, None)
            if self.guides:
                self.guides.retire(row)
        if plan.swap_out:
            self.cache.swap_out(plan.swap_out)
        if plan.swap_in:
            self.cache.swap_in(plan.swap_in)
        if plan.copies:
            self.cache.copy(plan.copies)
        for slot, adapter in plan.adapters:
            assert self.adapters is not None, "no adapters were enabled"
            self.adapters.put(slot, adapter)
        for admission in plan.admitted:
            if self.sources:
                admission = self.sources.admit(admission)
            self.rows.admit(admission)
            self.sampler.admit(admission.row, row_params(admission), admission.tokens, admission.num_prompt)
            if self.guides:
                self.guides.admit(admission)
            if admission.params.prompt_logprobs is not None:
                self._prompt_logprobs[admission.row] = admission.params.prompt_logprobs

    def _launch(self, plan: StepPlan) -> Callable[[], list[Drawn]]:
        runs = self.sources.read(plan.runs) if self.sources else plan.runs
        if not runs:
            return list
        step = self.rows.step(runs)
        if self.sources:
            self.sources.attach(step.batch, runs)
        logits = self.program.run(step.batch)
        rows = step.drawing.tolist()
        masks = self.guides.masks(rows) if self.guides else None  # on a GPU, while the forward pass runs
        draws = self.sampler.begin(logits[: len(rows)], rows, masks) if rows else list
        expected = [self.rows.expect(row) for row in rows]
        scored = self._score(step, logits)

        def finish() -> list[Drawn]:
            drawn: dict[int, Drawn] = {}
            for row, place, draw in zip(rows, expected, draws(), strict=True):
                drawn[row] = self._take(row, draw)
                self.rows.settle(row, place, draw.token)
            for row, logprobs in scored.items():
                drawn.setdefault(row, Drawn(row)).prompt_logprobs = logprobs
            return list(drawn.values())

        return finish

    def _take(self, row: int, draw: Draw) -> Drawn:
        if self.guides and draw.token >= 0:
            self.guides.advance(row, [draw.token])
        if self.guides and draw.token == BROKEN and (reason := self.guides.error(row)):
            return Drawn(row, error=f"the language of the answer: {reason}")
        return _drawn(row, draw)

    def _score(self, step: Step, logits: Any) -> dict[int, list[list[Logprob]]]:
        """Prompt logprobs by row: now, since the logits are gone with the next step."""
        found = {}
        for row, lines, targets in step.scored:
            entries = self.sampler.logprobs(logits[lines], targets, self._prompt_logprobs[row])
            found[row] = [_logprobs(line) for line in entries]
        return found


def _sources(ops: OpSet, model: Model, cache: KVCache, size: KVSize, max_rows: int, max_tokens: int) -> Sources | None:
    if model.encode is None:
        return None
    assert isinstance(model.config, Seq2SeqConfig)
    longest = min(model.config.seq2seq.max_source, size.max_model_len)
    most = max(max_tokens, longest)
    encoder = ops.compile(model.encode, cache, most, max_rows, longest, sources=True)
    return Sources(encoder, max_rows, longest, most, size.spec.block_size)


def _drawn(row: int, draw: Draw) -> Drawn:
    if draw.token == BROKEN:
        return Drawn(row, error="the model gave no number for any token that may follow")
    if draw.token == CANDIDATES:
        return Drawn(row, beams=_logprobs(draw.logprobs))
    return Drawn(row, [draw.token], [_logprobs(draw.logprobs)] if draw.logprobs else None)


def _logprobs(found: Iterable[tuple[int, float, int]]) -> list[Logprob]:
    return [Logprob(token, logprob, rank) for token, logprob, rank in found]
