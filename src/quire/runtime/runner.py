"""Carries out plans: a `StepPlan` becomes arrays, a forward pass, and sampled tokens."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from quire.core.plan import SampledRow, StepOutput, StepPlan
from quire.core.request import IdLogprob
from quire.models.config import Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.ops.opset import KVCache, Masks, OpSet
from quire.ops.sampled_row import id_logprobs
from quire.runtime.adapters import LoraAdapters
from quire.runtime.batch import BatchedStep, BatchRows
from quire.runtime.encoder_inputs import EncoderInputs
from quire.runtime.kv import KVSize
from quire.runtime.sampling import row_params
from quire.runtime.spec.proposer import Proposer
from quire.runtime.structured_output import MatcherFactory, StructuredOutputRows

if TYPE_CHECKING:
    from quire.runtime.disk_tier import DiskTier
    from quire.runtime.kv_transfer.consumer import KVConsumer
    from quire.runtime.kv_transfer.producer import KVProducer


class Runner:
    """One model on one device. It keeps what plans do not repeat: each row's tokens, blocks and parameters.

    `submit` returns when the step is queued on the device, `collect` when the oldest step submitted is done. Where the
    device samples, the next plan may be submitted before this process knows the tokens it continues."""

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
        new_store: "Callable[[KVCache], DiskTier | None]" = lambda cache: None,
        new_transfer: "Callable[[KVCache], KVProducer | KVConsumer | None]" = lambda cache: None,
    ) -> None:
        """`idle_cpu`: a CPU has nothing to do during a forward pass, so masks are made beside it. `new_store` makes the
        store of blocks on disk for the cache, `new_transfer` what moves them to or from other engines."""
        self.rows = BatchRows(max_rows, size.max_model_len, size.spec.block_size)
        self.cache = ops.new_cache(size.spec, size.num_blocks, size.num_host_blocks)
        self.transfer = new_transfer(self.cache)  # first: it may move the host blocks
        self.store = new_store(self.cache)
        self.sampler = ops.new_sampler(max_rows, model.config.vocab)
        self.adapters = adapters
        self.proposer = proposer
        self._caches: list[KVCache] = [self.cache]  # blocks move in all of them
        if proposer:
            proposer.bind(self.rows)
            self._caches += proposer.caches
        forward = model.forward if adapters is None else adapters.forward
        has_encoder = model.encode is not None
        self.program = ops.compile(
            forward, self.cache, max_tokens, max_rows, size.max_model_len, self.sampler, sources=has_encoder
        )
        self.encoder_inputs = _encoder_inputs(ops, model, self.cache, size, max_rows, max_tokens)
        self.structured: StructuredOutputRows | None = None
        self._helper = ThreadPoolExecutor(1, "masks") if idle_cpu else None
        self._vocab = model.config.vocab
        self._prompt_logprobs: dict[int, int] = {}  # row -> alternatives wanted beside each prompt token
        # Steps in flight, and how to wait for what each sampled.
        self._in_flight: deque[tuple[int, Callable[[], list[SampledRow]]]] = deque()

    def set_matcher_factory(self, new_matcher: MatcherFactory) -> None:
        """From now on, rows may ask for structured output."""
        self.structured = StructuredOutputRows(self._vocab, new_matcher)

    def submit(self, plan: StepPlan) -> None:
        self._prepare(plan)
        self._in_flight.append((plan.step, self._launch(plan) if plan.runs else list))

    def collect(self) -> StepOutput:
        step, finish = self._in_flight.popleft()
        return StepOutput(step, finish())

    def run(self, plan: StepPlan) -> StepOutput:
        self.submit(plan)
        return self.collect()

    def _prepare(self, plan: StepPlan) -> None:
        """All of the plan but its runs, in the order that `StepPlan` states."""
        for row in plan.retired:
            self.rows.retire(row)
            self.sampler.retire(row)
            self._prompt_logprobs.pop(row, None)
            if self.structured:
                self.structured.retire(row)
            if self.proposer:
                self.proposer.retire(row)
        for cache in self._caches:
            if plan.swap_out:
                cache.swap_out(plan.swap_out)
            if plan.swap_in:
                cache.swap_in(plan.swap_in)
        if plan.saves or plan.fetches:
            assert self.store is not None, "there is no store of blocks"
            self.store.begin(plan, self.cache.swapped())
        if plan.prefills or plan.sends:
            assert self.transfer is not None, "there are no other engines"
            self.transfer.begin(plan, self.cache.swapped())
        if plan.copies:
            for cache in self._caches:
                cache.copy(plan.copies)
        for slot, adapter in plan.adapters:
            assert self.adapters is not None, "LoRA is not enabled"
            self.adapters.put(slot, adapter)
        for admission in plan.admitted:
            if self.encoder_inputs:
                admission = self.encoder_inputs.admit(admission)
            self.rows.admit(admission)
            params = row_params(admission.params, admission.sample, admission.stop_ids)
            self.sampler.admit(admission.row, params, admission.tokens, admission.num_prompt, admission.mu)
            if self.proposer:
                self.proposer.admit(admission)
            if self.structured and admission.params.structured:
                self.structured.admit(admission)
            if admission.params.prompt_logprobs is not None:
                self._prompt_logprobs[admission.row] = admission.params.prompt_logprobs

    def _launch(self, plan: StepPlan) -> Callable[[], list[SampledRow]]:
        runs = self.encoder_inputs.encode(plan.runs) if self.encoder_inputs else plan.runs
        if not runs:
            return list
        step = self.rows.step(runs)
        if self.encoder_inputs:
            self.encoder_inputs.attach(step.batch, runs)
        rows = step.sampling.tolist()
        logits, masks = self._compute(step, rows)
        if self.proposer:
            self.proposer.follow(runs, step.batch)
        finish = self._verify(step, logits, rows, masks) if step.drafts else self._sample(logits, rows, masks)
        scored = self._score(step, logits) if step.scored else {}

        def finish_all() -> list[SampledRow]:
            sampled = finish()
            for row, logprobs in scored.items():
                sampled.setdefault(row, SampledRow(row)).prompt_logprobs = logprobs
            return list(sampled.values())

        return finish_all

    def _compute(self, step: BatchedStep, rows: list[int]) -> tuple[Any, Masks | None]:
        """The logits, and the masks of rows with structured output. On a GPU, and where a CPU is idle, masks are made
        while the forward pass runs."""
        if self.structured is None or not self.structured.any_matched(rows):
            return self.program.run(step.batch), None
        if self._helper is None:
            return self.program.run(step.batch), self.structured.masks(rows, step.drafts)
        masks = self._helper.submit(self.structured.masks, rows, step.drafts)
        return self.program.run(step.batch), masks.result()

    def _sample(self, logits: Any, rows: list[int], masks: Masks | None) -> Callable[[], dict[int, SampledRow]]:
        """Sample one token for each row."""
        sample = self.sampler.begin(logits[: len(rows)], rows, masks) if rows else list
        places = {row: self.rows.expect(row) for row in rows}

        def finish() -> dict[int, SampledRow]:
            sampled = {one.row: one for one in sample()}
            for row, one in sampled.items():
                self.rows.settle(row, places[row], one.tokens[0] if one.tokens else -1)
            if self.structured or self.proposer:
                self._follow(sampled, places)
            return sampled

        return finish

    def _verify(
        self, step: BatchedStep, logits: Any, rows: list[int], masks: Masks | None
    ) -> Callable[[], dict[int, SampledRow]]:
        """Sample each row's tokens while they equal its draft tokens, and one more."""
        drafts = [step.drafts.get(row, []) for row in rows]
        num_lines = len(rows) + sum(map(len, drafts))
        sample = self.sampler.verify(logits[:num_lines], rows, drafts, masks)
        places = {
            row: self.rows.remove_drafts(row, len(of_row)) if of_row else self.rows.expect(row)
            for row, of_row in zip(rows, drafts, strict=True)
        }

        def finish() -> dict[int, SampledRow]:
            sampled = {one.row: one for one in sample()}
            for row, one in sampled.items():
                if row in step.drafts:
                    self.rows.extend(row, places[row], one.tokens)
                else:
                    self.rows.settle(row, places[row], one.tokens[0] if one.tokens else -1)
            if self.structured or self.proposer:
                self._follow(sampled, places)
            return sampled

        return finish

    def _follow(self, sampled: dict[int, SampledRow], places: dict[int, tuple[int, int]]) -> None:
        """Advance the matchers of rows that still hold their sequence, and propose draft tokens for them."""
        if self.structured:
            for row, one in sampled.items():
                if self.rows.is_held(row, places[row]):
                    self.structured.advance(row, one.tokens)
                    if one.error and (reason := self.structured.error(row)):
                        one.error = f"structured output: {reason}"
        if self.proposer is None:
            return
        known = {
            row: self.rows.known(row, places[row], len(one.tokens))
            for row, one in sampled.items()
            if one.tokens and self.rows.is_held(row, places[row])
        }
        for row, drafts in self.proposer.propose(known).items():
            if self.structured:
                drafts = drafts[: self.structured.count_valid(row, drafts)]
            sampled[row].drafts = drafts

    def _score(self, step: BatchedStep, logits: Any) -> dict[int, list[list[IdLogprob]]]:
        """Prompt logprobs by row. The logits are valid until the next step."""
        prompt_logprobs = {}
        for row, lines, targets in step.scored:
            entries = self.sampler.logprobs(logits[lines], targets, self._prompt_logprobs[row])
            prompt_logprobs[row] = [id_logprobs(line) for line in entries]
        return prompt_logprobs


def _encoder_inputs(
    ops: OpSet, model: LoadedModel, cache: KVCache, size: KVSize, max_rows: int, max_tokens: int
) -> EncoderInputs | None:
    if model.encode is None:
        return None
    assert isinstance(model.config, Seq2SeqConfig)
    longest = min(model.config.seq2seq.max_encoder_tokens, size.max_model_len)
    most = max(max_tokens, longest)
    encoder = ops.compile(model.encode, cache, most, max_rows, longest, sources=True)
    return EncoderInputs(encoder, max_rows, longest, most, size.spec.block_size)
