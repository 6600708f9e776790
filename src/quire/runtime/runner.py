"""Carries out plans: a `StepPlan` becomes arrays, a forward pass, and drawn tokens."""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.core.request import IdLogprob
from quire.models.config import Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.ops.opset import BROKEN, CANDIDATES, KVCache, Masks, OpSet, Sample
from quire.runtime.adapters import LoraAdapters
from quire.runtime.batch import BatchedStep, BatchRows
from quire.runtime.encoder_inputs import EncoderInputs
from quire.runtime.kv import KVSize
from quire.runtime.sampling import row_params
from quire.runtime.spec.proposer import Proposer
from quire.runtime.structured_output import Matchers, StructuredOutputRows


class Runner:
    """One model on one device. It keeps what plans do not repeat: each row's tokens, blocks and parameters.

    `submit` returns when the device knows what to do, `collect` when the oldest step submitted is done. A plan may be
    submitted before the tokens it goes on from are known here, if the device draws them."""

    def __init__(
        self,
        ops: OpSet,
        model: LoadedModel,
        size: KVSize,
        *,
        max_rows: int,
        max_tokens: int,
        adapters: LoraAdapters | None = None,
        proposer: Proposer | None = None,
        idle_cpu: bool = False,
    ) -> None:
        """`adapters` are those of the model, where plans may ask for some. `proposer` guesses what comes next.
        `idle_cpu`: while a forward pass runs and is waited for, a CPU has nothing to do."""
        self.rows = BatchRows(max_rows, size.max_model_len, size.spec.block_size)
        self.cache = ops.new_cache(size.spec, size.num_blocks, size.num_host_blocks)
        self.sampler = ops.new_sampler(max_rows, model.config.vocab)
        self.adapters = adapters
        self.proposer = proposer
        forward = model.forward if adapters is None else adapters.forward
        sources = model.encode is not None
        self.program = ops.compile(
            forward, self.cache, max_tokens, max_rows, size.max_model_len, self.sampler, sources=sources
        )
        self.sources = _sources(ops, model, self.cache, size, max_rows, max_tokens)
        self.guides: StructuredOutputRows | None = None
        self._helper = ThreadPoolExecutor(1, "masks") if idle_cpu else None
        self._vocab = model.config.vocab
        self._prompt_logprobs: dict[int, int] = {}  # row -> alternatives wanted beside each prompt token
        self._under_way: deque[tuple[int, Callable[[], list[SampledRow]]]] = (
            deque()
        )  # steps, and how to get what they drew

    def guide(self, matchers: Matchers) -> None:
        """From now on, rows may ask for answers in a language."""
        self.guides = StructuredOutputRows(self._vocab, matchers)

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
            if self.proposer:
                self.proposer.retire(row)
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

    def _launch(self, plan: StepPlan) -> Callable[[], list[SampledRow]]:
        runs = self.sources.read(plan.runs) if self.sources else plan.runs
        if not runs:
            return list
        step = self.rows.step(runs)
        if self.sources:
            self.sources.attach(step.batch, runs)
        rows = step.drawing.tolist()
        logits, masks = self._compute(step, rows)
        finish = self._verify(step, logits, rows, masks) if step.drafts else self._draw(logits, rows, masks)
        scored = self._score(step, logits)

        def finish_all() -> list[SampledRow]:
            drawn = finish()
            for row, logprobs in scored.items():
                drawn.setdefault(row, SampledRow(row)).prompt_logprobs = logprobs
            return list(drawn.values())

        return finish_all

    def _compute(self, step: BatchedStep, rows: list[int]) -> tuple[Any, Masks | None]:
        """The logits, and what the rows may draw of them. Masks are made while the forward pass runs: on a GPU, and
        where a CPU is idle; else after it."""
        if self.guides is None or not self.guides.guides(rows):
            return self.program.run(step.batch), None
        if self._helper is None:
            return self.program.run(step.batch), self.guides.masks(rows, step.drafts)
        masks = self._helper.submit(self.guides.masks, rows, step.drafts)
        return self.program.run(step.batch), masks.result()

    def _draw(self, logits: Any, rows: list[int], masks: Masks | None) -> Callable[[], dict[int, SampledRow]]:
        """One token for each row."""
        draws = self.sampler.begin(logits[: len(rows)], rows, masks) if rows else list
        places = [self.rows.expect(row) for row in rows]

        def finish() -> dict[int, SampledRow]:
            drawn: dict[int, SampledRow] = {}
            for row, place, draw in zip(rows, places, draws(), strict=True):
                drawn[row] = self._take(row, place, [draw])
                self.rows.settle(row, place, draw.token)
            if self.proposer:
                self._propose(drawn, dict(zip(rows, places, strict=True)))
            return drawn

        return finish

    def _verify(
        self, step: BatchedStep, logits: Any, rows: list[int], masks: Masks | None
    ) -> Callable[[], dict[int, SampledRow]]:
        """As many for each row as its drafts were right, and one more."""
        drafts = [step.drafts.get(row, []) for row in rows]
        num_lines = len(rows) + sum(map(len, drafts))
        draws = self.sampler.verify(logits[:num_lines], rows, drafts, masks)
        places = [
            self.rows.take_back(row, len(of_row)) if of_row else self.rows.expect(row)
            for row, of_row in zip(rows, drafts, strict=True)
        ]

        def finish() -> dict[int, SampledRow]:
            drawn: dict[int, SampledRow] = {}
            for row, place, of_row, found in zip(rows, places, drafts, draws(), strict=True):
                if len(found) > 1 and found[-1].token == BROKEN:
                    found.pop()  # found again, and told, when it is the next
                drawn[row] = self._take(row, place, found)
                if of_row:
                    self.rows.extend(row, place, drawn[row].tokens)
                else:
                    self.rows.settle(row, place, found[0].token)
            self._propose(drawn, dict(zip(rows, places, strict=True)))
            return drawn

        return finish

    def _propose(self, drawn: dict[int, SampledRow], places: dict[int, tuple[int, int]]) -> None:
        """Guess what follows, for rows that still have their sequence."""
        assert self.proposer is not None
        known = {
            row: self.rows.known(row, places[row], len(one.tokens))
            for row, one in drawn.items()
            if one.tokens and self.rows.is_held(row, places[row])
        }
        for row, drafts in self.proposer.propose(known).items():
            if self.guides:
                drafts = drafts[: self.guides.count_valid(row, drafts)]
            drawn[row].drafts = drafts

    def _take(self, row: int, place: tuple[int, int], draws: list[Sample]) -> SampledRow:
        if self.guides and self.rows.is_held(row, place):
            self.guides.advance(row, [draw.token for draw in draws if draw.token >= 0])
            if draws[0].token == BROKEN and (reason := self.guides.error(row)):
                return SampledRow(row, error=f"the language of the answer: {reason}")
        return _drawn(row, draws)

    def _score(self, step: BatchedStep, logits: Any) -> dict[int, list[list[IdLogprob]]]:
        """Prompt logprobs by row: now, since the logits are gone with the next step."""
        found = {}
        for row, lines, targets in step.scored:
            entries = self.sampler.logprobs(logits[lines], targets, self._prompt_logprobs[row])
            found[row] = [_logprobs(line) for line in entries]
        return found


def _sources(
    ops: OpSet, model: LoadedModel, cache: KVCache, size: KVSize, max_rows: int, max_tokens: int
) -> EncoderInputs | None:
    if model.encode is None:
        return None
    assert isinstance(model.config, Seq2SeqConfig)
    longest = min(model.config.seq2seq.max_encoder_tokens, size.max_model_len)
    most = max(max_tokens, longest)
    encoder = ops.compile(model.encode, cache, most, max_rows, longest, sources=True)
    return EncoderInputs(encoder, max_rows, longest, most, size.spec.block_size)


def _drawn(row: int, draws: list[Sample]) -> SampledRow:
    """One, or several that all are tokens."""
    first = draws[0]
    if first.token == BROKEN:
        return SampledRow(row, error="the model gave no number for any token that may follow")
    if first.token == CANDIDATES:
        return SampledRow(row, beams=_logprobs(first.logprobs))
    logprobs = [_logprobs(draw.logprobs) for draw in draws] if first.logprobs else None
    return SampledRow(row, [draw.token for draw in draws], logprobs)


def _logprobs(found: Iterable[tuple[int, float, int]]) -> list[IdLogprob]:
    return [IdLogprob(token, logprob, rank) for token, logprob, rank in found]
