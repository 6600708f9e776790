"""Carries out plans: a `StepPlan` becomes arrays, a forward pass, and sampled tokens."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from quire.core.draft_tree import DraftTree, is_unknown
from quire.core.plan import UNKNOWN, Admission, Run, SampledRow, StepOutput, StepPlan
from quire.models.config import Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.ops.kv_spec import KVCache, WindowedKVCache
from quire.ops.opset import Int32, Masks, OpSet, ProgramSpec
from quire.ops.sampled_row import id_logprobs
from quire.runtime.adapters import LoraAdapters
from quire.runtime.batch import BatchedStep, BatchRows, Places
from quire.runtime.encoder_inputs import EncoderInputs
from quire.runtime.kv import KVSize
from quire.runtime.sampling import row_params
from quire.runtime.spec.proposers import Proposers
from quire.runtime.structured_output import MatcherFactory, StructuredOutputRows

if TYPE_CHECKING:
    from quire.runtime.disk_tier import DiskTier
    from quire.runtime.kv_transfer.consumer import KVConsumer
    from quire.runtime.kv_transfer.producer import KVProducer

Finish = Callable[[], dict[int, SampledRow]]  # waits for what a step sampled, by row
Pairs = list[tuple[int, int]]


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
        proposer: Proposers | None = None,
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
        forward = model.forward if adapters is None else adapters.forward
        if proposer:
            forward = proposer.tapped(forward)
            self._caches += proposer.caches
        has_encoder = model.encode is not None
        self.program = ops.compile(
            forward,
            self.cache,
            ProgramSpec(
                max_tokens,
                max_rows,
                size.max_model_len,
                self.sampler,
                sources=has_encoder,
                tree_nodes=proposer.tree_nodes if proposer else 0,
                max_drafts=proposer.max_drafts if proposer else 0,
            ),
        )
        if proposer:
            proposer.bind(self.rows, self.program, self.sampler)
        self.encoder_inputs = _encoder_inputs(ops, model, self.cache, size, max_rows, max_tokens)
        self.structured: StructuredOutputRows | None = None
        self.is_timed = proposer is not None  # outputs tell how long the device took
        self._timer = ops.new_timer()
        self._untold: deque[int] = deque()  # steps of which the timer has yet to tell
        self._step_times: deque[tuple[int, float]] = deque()  # what it told of others
        self._helper = ThreadPoolExecutor(1, "masks") if idle_cpu else None
        self._vocab = model.config.vocab
        self._prompt_logprobs: dict[int, int] = {}  # row -> alternatives wanted beside each prompt token
        # Steps in flight, and how to wait for what each sampled.
        self._in_flight: deque[tuple[int, Finish]] = deque()

    def set_matcher_factory(self, new_matcher: MatcherFactory) -> None:
        """From now on, rows may ask for structured output."""
        self.structured = StructuredOutputRows(self._vocab, new_matcher)

    @property
    def _windowed_cache(self) -> WindowedKVCache:
        return cast(WindowedKVCache, self.cache)

    def submit(self, plan: StepPlan) -> None:
        """Carry out the plan in the order that `StepPlan` states, up to the forward pass."""
        if self.proposer and plan.swap_out:
            self.proposer.read_rest(plan.retired)
        for row in plan.retired:
            self._retire(row)
        self._move_memory(plan)
        for slot, adapter in plan.adapters:
            assert self.adapters is not None, "LoRA is not enabled"
            self.adapters.put(slot, adapter)
        for admission in plan.admitted:
            self._admit(admission)
        self._in_flight.append((plan.step, self._launch(plan) if plan.runs else dict))

    def collect(self) -> StepOutput:
        step, finish = self._in_flight.popleft()
        sampled = list(finish().values())
        output = StepOutput(step, sampled, *(self.proposer.take_times() if self.proposer else ()))
        if self.is_timed:
            output.device_seconds = self._device_seconds(step, has_ended=bool(sampled))
        return output

    def run(self, plan: StepPlan) -> StepOutput:
        self.submit(plan)
        return self.collect()

    def _device_seconds(self, step: int, has_ended: bool) -> float:
        """0 where it is not known: nothing waits for the end of a step that sampled nothing."""
        num_ended = sum(number <= step for number in self._untold) if has_ended else 0
        self._step_times += [(self._untold.popleft(), seconds) for _, seconds in self._timer.take(num_ended)]
        while self._step_times and self._step_times[0][0] < step:
            self._step_times.popleft()
        is_known = self._step_times and self._step_times[0][0] == step
        return self._step_times.popleft()[1] if is_known else 0.0

    def _retire(self, row: int) -> None:
        self.rows.retire(row)
        self.sampler.retire(row)
        self._prompt_logprobs.pop(row, None)
        if self.structured:
            self.structured.retire(row)
        if self.proposer:
            self.proposer.retire(row)

    def _move_memory(self, plan: StepPlan) -> None:
        """Blocks, pages and states: within the cache, and between it, host memory, disk and other engines."""
        for cache in self._caches:
            if plan.swap_out:
                cache.swap_out(plan.swap_out)
                if _writes(plan, {block for block, _ in plan.swap_out}):
                    cache.join_swaps()
            if plan.swap_in:
                cache.swap_in(plan.swap_in)
        self._swap_pages(plan.page_swap_out, plan.pages, plan.page_swap_in)
        self._move_states(plan.checkpoints, plan.state_swap_out, plan.state_swap_in, plan.resumed)
        if plan.saves or plan.fetches:
            assert self.store is not None, "there is no store of blocks"
            self.store.begin(plan, self.cache.swapped())
        if plan.prefills or plan.sends:
            assert self.transfer is not None, "there are no other engines"
            self.transfer.begin(plan, self.cache.swapped())
        if plan.copies:
            for cache in self._caches:
                cache.copy(plan.copies)
        if plan.page_copies:
            self._windowed_cache.copy_pages(plan.page_copies)
        if self.proposer:
            self.proposer.move_blocks(plan)

    def _swap_pages(self, swap_out: Pairs, attached: Pairs, swap_in: Pairs) -> None:
        if swap_out:
            self._windowed_cache.swap_pages_out(swap_out)
        if attached:
            self._windowed_cache.attach_pages(attached)
        if swap_in:
            self._windowed_cache.swap_pages_in(swap_in)

    def _move_states(self, checkpoints: Pairs, swap_out: Pairs, swap_in: Pairs, resumed: Pairs) -> None:
        if checkpoints:
            self.cache.copy_states(checkpoints)
        if swap_out:
            self.cache.swap_states_out(swap_out)
        if swap_in:
            self.cache.swap_states_in(swap_in)
        if resumed:
            self.cache.copy_states(resumed)

    def _admit(self, admission: Admission) -> None:
        if self.encoder_inputs:
            admission = self.encoder_inputs.admit(admission)
        self.rows.admit(admission)
        params = row_params(admission.params, admission.sample, admission.stop_ids)
        self.sampler.admit(admission.row, params, admission.tokens, admission.num_prompt, admission.mu)
        if self.proposer:
            self.proposer.admit(admission)
        if self.structured and admission.params.needs_masks:
            self.structured.admit(admission)
        if admission.params.prompt_logprobs is not None:
            self._prompt_logprobs[admission.row] = admission.params.prompt_logprobs

    def _launch(self, plan: StepPlan) -> Finish:
        runs = self.encoder_inputs.encode(plan.runs) if self.encoder_inputs else plan.runs
        if not runs:
            return dict
        step = self.rows.step(runs)
        if self.encoder_inputs:
            self.encoder_inputs.attach(step.batch, runs)
        rows = step.sampling.tolist()
        if self.is_timed:
            self._timer.start()
        logits, masks = self._compute(step, rows)
        for cache in self._caches:
            cache.join_swaps()
        if self.proposer:
            self.proposer.follow(runs, step.batch)
        by_row = {run.row: run for run in runs} if self.proposer else {}
        finish = self._sample(step, logits, rows, masks, by_row, plan.step)
        return self._with_prompt_logprobs(step, logits, finish) if step.scored else finish

    def _compute(self, step: BatchedStep, rows: list[int]) -> tuple[Any, Masks | None]:
        """The logits, and the masks of rows with structured output. On a GPU, and where a CPU is idle, masks are made
        while the forward pass runs."""
        if self.structured is None or not self.structured.any_matched(rows):
            return self.program.run(step.batch), None
        if self._helper is None:
            return self.program.run(step.batch), self.structured.masks(rows, step.drafts, step.parents)
        masks = self._helper.submit(self.structured.masks, rows, step.drafts, step.parents)
        return self.program.run(step.batch), masks.result()

    def _sample(
        self, step: BatchedStep, logits: Any, rows: list[int], masks: Masks | None, runs: dict[int, Run], number: int
    ) -> Finish:
        """Sample one token for each row; of one with draft tokens, its tokens while they equal these, and one more.
        `number`: of the plan."""
        drafts = [step.drafts.get(row, []) for row in rows] if step.drafts else []
        sample: Callable[[], list[SampledRow]] = list
        if step.drafts:
            parents = [step.parents.get(row, []) for row in rows] if step.parents else None
            num_lines = len(rows) + sum(map(len, drafts))
            sample = self.sampler.verify(logits[:num_lines], rows, drafts, masks, parents)
        elif rows:
            sample = self.sampler.begin(logits[: len(rows)], rows, masks)
        if self.is_timed and self._timer.stop(step.batch.num_tokens):
            self._untold.append(number)
        unknown = [row for row, of_row in step.parents.items() if is_unknown(of_row)]
        trees = self.proposer.grown_trees(unknown) if self.proposer else {}
        num_drafts = np.fromiter(map(len, drafts), np.int32) if drafts else np.zeros(len(rows), np.int32)
        places = self.rows.expect(step.sampling, num_drafts)
        if step.drafts and self.proposer and masks is None and not (step.parents and self.proposer.synthetic):
            known = dict(zip(rows, places.positions.tolist(), strict=True))
            self.proposer.propose_ahead(known, step.drafts, runs)

        def finish() -> dict[int, SampledRow]:
            known = self._fill_in(step, {row: arrive() for row, arrive in trees.items()})
            sampled = {one.row: one for one in sample()}
            for row, tree in known.items():
                sampled[row].tree = tree
            if step.drafts and self.proposer and self.proposer.synthetic:
                self.proposer.accept(sampled, self._unmatched(step))
            if step.parents:
                self._move_accepted(step, sampled, places)
            tokens = [one.tokens for one in sampled.values()]
            self.rows.settle(places, tokens)
            if self.structured and self.structured.any_matched(rows):
                self._advance_matchers(sampled, places)
            if self.proposer:
                self._propose(self.proposer, sampled, self.rows.known(places, tokens), runs)
            return sampled

        return finish

    def _fill_in(self, step: BatchedStep, trees: dict[int, DraftTree]) -> dict[int, DraftTree]:
        """Trees that only the device knew when the step was planned."""
        for row, tree in trees.items():
            count = len(step.drafts[row])
            step.drafts[row][:], step.parents[row][:] = tree.tokens[:count], tree.parents[:count]
            assert self.proposer is not None
            self.proposer.take_tree(row, tree)
        return trees

    def _move_accepted(self, step: BatchedStep, sampled: dict[int, SampledRow], places: Places) -> None:
        """Move the keys and values of accepted drafts of trees to where those of a chain are. (What methods have in
        caches of their own is where they put it.)"""
        of_rows = zip(places.rows.tolist(), places.positions.tolist(), self.rows.held(places).tolist(), strict=True)
        moved = [
            pair
            for row, position, is_held in of_rows
            if is_held and row in step.parents
            for pair in self.rows.moved_slots(row, position, step.drafts[row], step.parents[row], sampled[row].tokens)
        ]
        if moved:
            self.cache.move(moved)

    def _unmatched(self, step: BatchedStep) -> dict[int, list[int]]:
        """The drafts of rows that have neither structured output nor a tree."""
        if not step.parents and not (self.structured and self.structured.any_matched(step.drafts)):
            return step.drafts
        matched = self.structured.any_matched if self.structured else lambda rows: False
        return {row: of_row for row, of_row in step.drafts.items() if row not in step.parents and not matched([row])}

    def _advance_matchers(self, sampled: dict[int, SampledRow], places: Places) -> None:
        """Those of rows that still hold their sequence."""
        assert self.structured is not None
        for one, is_held in zip(sampled.values(), self.rows.held(places).tolist(), strict=True):
            if is_held:
                self.structured.advance(one.row, one.tokens)
                if one.error and (reason := self.structured.error(one.row)):
                    one.error = f"structured output: {reason}"

    def _propose(
        self, proposer: Proposers, sampled: dict[int, SampledRow], known: dict[int, Int32], runs: dict[int, Run]
    ) -> None:
        """Draft tokens for these rows, whose tokens are given."""
        any_matched = self.structured is not None and self.structured.any_matched(known)
        for row, proposals in proposer.propose(known, runs).items():
            for proposal in proposals:
                if not proposal.parents and not any_matched:
                    continue  # a chain may be any
                if UNKNOWN in proposal.tokens:
                    if self.structured is None or not self.structured.any_matched([row]):
                        continue
                    proposer.read_drafts(row, proposal)  # its grammar must know them
                tree = self._computable(row, DraftTree(proposal.tokens, proposal.parents, proposal.confidences))
                proposal.tokens, proposal.parents, proposal.confidences = tree.tokens, tree.parents, tree.confidences
            sampled[row].proposals = [proposal for proposal in proposals if proposal.tokens]

    def _computable(self, row: int, tree: DraftTree) -> DraftTree:
        """What the program can compute of a tree, without the drafts that the row's grammar rules out."""
        if tree.parents:
            tree.check()
            tree = tree if self.program.takes_trees else tree.first_branch()
        return self.structured.valid_drafts(row, tree) if self.structured else tree

    def _with_prompt_logprobs(self, step: BatchedStep, logits: Any, finish: Finish) -> Finish:
        """The logits are valid until the next step."""
        scored = {
            row: self.sampler.logprobs(logits[lines], targets, self._prompt_logprobs[row])
            for row, lines, targets in step.scored
        }

        def finish_all() -> dict[int, SampledRow]:
            sampled = finish()
            for row, lines in scored.items():
                sampled.setdefault(row, SampledRow(row)).prompt_logprobs = [id_logprobs(line) for line in lines]
            return sampled

        return finish_all


def _writes(plan: StepPlan, blocks: set[int]) -> bool:
    """Whether a plan writes one of these blocks. Those of a preempted sequence may be handed out again at once."""
    taken = chain(
        *(admission.blocks for admission in plan.admitted),
        *(run.new_blocks for run in plan.runs),
        (block for _, block in plan.swap_in),
        (block for _, block in plan.copies),
    )
    return not blocks.isdisjoint(taken)


def _encoder_inputs(
    ops: OpSet, model: LoadedModel, cache: KVCache, size: KVSize, max_rows: int, max_tokens: int
) -> EncoderInputs | None:
    if model.encode is None:
        return None
    assert isinstance(model.config, Seq2SeqConfig)
    longest = min(model.config.seq2seq.max_encoder_tokens, size.max_model_len)
    most = max(max_tokens, longest)
    encoder = ops.compile(model.encode, cache, ProgramSpec(most, max_rows, longest, sources=True))
    return EncoderInputs(encoder, max_rows, longest, most, size.spec.block_size)
