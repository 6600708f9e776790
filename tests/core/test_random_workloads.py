"""Any workload, on any pool that can hold it, gives each request the tokens it would have had alone."""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_peers import FakePrefillEngines
from fake_tiers import FakeStore
from fakes import FakeExecutor, draft_policy, make_drafts_free
from quire.core.errors import BadRequest
from quire.core.limits import SchedulerLimits
from quire.core.params import SamplingParams
from quire.core.plan import StepOutput
from quire.core.request import Request, SequenceEvent
from quire.core.scheduler import Scheduler
from quire.core.sliding_window import SlidingWindow
from trials import rounds

pytestmark = pytest.mark.trial

BLOCK, VOCAB, EOS = 4, 13, 0
Answer = dict[int, tuple[list[int], str | None]]  # by sample: tokens and why it ended


@dataclass
class Setting:
    num_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    budget: int
    threshold: int
    policy: str
    prefix_caching: bool
    ahead: int = 0
    pipelined: bool = False  # plans in flight are micro-batches
    window: int = 0
    num_adapters: int = 1
    num_drafts: int = 0
    draft_room: int = 0  # tokens of a step, beside the budget
    trees: bool = False
    unknown_trees: bool = False
    store: FakeStore | None = None
    offload: bool = False
    prefill_engines: FakePrefillEngines | None = None
    has_states: bool = False
    num_slots: int = 0
    num_host_slots: int = 0
    num_checkpoint_slots: int = 0
    small_host_slots: bool = False
    page_window: int = 0
    write_through: bool = False

    def __post_init__(self) -> None:
        if self.num_slots:
            self.window, self.trees, self.has_states = 0, False, False
        else:
            self.num_checkpoint_slots = 0
        if self.num_slots or self.prefill_engines:
            self.page_window = 0
        if self.page_window:
            self.window, self.has_states, self.offload = 0, False, False

    @property
    def num_pages(self) -> int:
        """As few as are allowed, or some more."""
        if not self.page_window:
            return 0
        window = SlidingWindow(self.page_window, BLOCK, max_chunk=self.budget, ahead=self.ahead)
        return window.num_needed(self.max_num_seqs, self.budget + self.draft_room) + self.num_blocks % 7


@dataclass
class Arrival:
    step: int
    request: Request
    cancel_at: tuple[int, bool, int | None] | None  # (step, while the plan runs, sample)


SETTINGS = st.builds(
    Setting,
    num_blocks=st.integers(8, 15) | st.integers(8, 40),  # mostly too few
    num_host_blocks=st.sampled_from([0, 0, 5, 30]),
    max_num_seqs=st.integers(1, 3) | st.integers(4, 6),
    budget=st.integers(6, 40),
    threshold=st.sampled_from([0, 0, 5, 8]),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    prefix_caching=st.booleans(),
    ahead=st.integers(0, 2),
    pipelined=st.booleans(),
    window=st.just(0) | st.integers(1, 20),
    num_adapters=st.integers(1, 3),
    num_drafts=st.sampled_from([0, 1, 5]),
    draft_room=st.sampled_from([0, 0, 8]),
    trees=st.booleans(),
    unknown_trees=st.booleans(),
    store=st.none() | st.builds(FakeStore, st.integers(0, 3), failures=st.sampled_from([0.0, 0.2])),
    offload=st.booleans(),
    has_states=st.booleans(),
    num_slots=st.sampled_from([0, 0, 3, 4, 9, 30]),
    num_host_slots=st.sampled_from([0, 1, 2, 20]),
    num_checkpoint_slots=st.sampled_from([0, 1, 3, 20]),
    small_host_slots=st.booleans(),
    page_window=st.just(0) | st.integers(1, 20),
)
SHAPES = st.one_of(
    st.fixed_dictionaries({"n": st.integers(1, 4)}),
    st.fixed_dictionaries({"n": st.integers(1, 2), "best_of": st.integers(2, 4)}),
    st.fixed_dictionaries({"beam_width": st.integers(1, 4), "early_stopping": st.booleans()}),
)
PARAMS = st.builds(
    lambda shape, **rest: SamplingParams(**shape, **rest),
    SHAPES,
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 8) | st.integers(8, 24),
    min_tokens=st.just(0),
    ignore_eos=st.booleans(),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
PROMPTS = st.builds(  # few distinct tokens and common prefixes: much is shared
    lambda common, own: [*([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4][:common]), *own],
    st.integers(0, 12),
    st.lists(st.integers(1, 3), min_size=1, max_size=9),
)
CANCELS = st.none() | st.none() | st.tuples(st.integers(0, 25), st.booleans(), st.none() | st.integers(0, 3))


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    requests = []
    for i in range(draw(st.integers(1, 7))):
        request = Request(
            id=f"r{i}",
            prompt_ids=draw(PROMPTS),
            params=draw(PARAMS),
            eos_ids=[EOS],
            tenant=draw(st.sampled_from(["", "", "other"])),
            adapter=draw(st.sampled_from(["", "", "", "a", "b", "c"])),
            priority=draw(st.integers(0, 2)),
            deadline=draw(st.sampled_from([None] * 5 + [4, 15, 40])),
        )
        requests.append(Arrival(draw(st.integers(0, 6)), request, draw(CANCELS)))
    return sorted(requests, key=lambda arrival: arrival.step)


class Ledger:
    """All events that clients got, checked for their order."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.prompt_logprobs: dict[str, int] = defaultdict(int)
        self.reasons: dict[tuple[str, int], str] = {}
        self.ended: set[str] = set()

    def take(self, events: list[SequenceEvent]) -> None:
        for event in events:
            key = (event.request_id, event.index)
            assert event.request_id not in self.ended, f"{event} comes after the final event"
            assert key not in self.reasons, f"{event} comes after its sample ended"
            self.tokens[key] += event.tokens
            self.prompt_logprobs[event.request_id] += len(event.prompt_logprobs or ())
            if event.finish_reason is not None:
                self.reasons[key] = event.finish_reason
            if event.final:
                self.ended.add(event.request_id)

    def answer(self, request: Request) -> Answer:
        samples = sorted(index for name, index in self.reasons if name == request.id)
        return {i: (self.tokens[request.id, i], self.reasons[request.id, i]) for i in samples}


def make(setting: Setting) -> tuple[Scheduler, FakeExecutor]:
    limits = SchedulerLimits(
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.budget,
        max_draft_tokens=setting.draft_room,
        block_size=BLOCK,
        max_model_len=64,
        long_prefill_token_threshold=setting.threshold,
        step_seconds=float(setting.num_blocks % 2),
        has_states=setting.has_states or setting.num_slots > 0,
    )
    num_drafts = 0 if setting.has_states else setting.num_drafts
    scheduler = Scheduler(
        limits,
        setting.num_blocks,
        num_host_blocks=setting.num_host_blocks,
        policy=setting.policy,
        prefix_caching=setting.prefix_caching,
        ahead=setting.ahead,
        micro_batches=setting.ahead + 1 if setting.pipelined else 1,
        window=setting.window,
        num_adapters=setting.num_adapters,
        drafts=draft_policy(num_drafts),
        store=setting.store,
        offload=setting.offload,
        prefill_engines=setting.prefill_engines,
        num_slots=setting.num_slots,
        num_host_slots=setting.num_host_slots,
        num_checkpoint_slots=setting.num_checkpoint_slots,
        small_host_slots=setting.small_host_slots,
        num_pages=setting.num_pages,
        page_window=setting.page_window,
        write_through=setting.write_through,
    )
    if num_drafts:
        make_drafts_free(scheduler.speculation)
    executor = FakeExecutor(
        num_blocks=setting.num_blocks,
        num_host_blocks=setting.num_host_blocks,
        block_size=BLOCK,
        vocab_size=VOCAB,
        window=setting.window,
        num_drafts=num_drafts,
        accuracy=0.9,
        trees=setting.trees,
        unknown_trees=setting.unknown_trees,
        ahead=setting.ahead,
        store=setting.store,
        peers=setting.prefill_engines,
        has_states=setting.has_states,
        num_slots=setting.num_slots,
        num_host_slots=setting.num_host_slots,
        num_checkpoint_slots=setting.num_checkpoint_slots,
        num_pages=setting.num_pages,
        page_window=setting.page_window,
    )
    return scheduler, executor


def alone(request: Request) -> Answer:
    """What the request gives with a large engine to itself."""
    scheduler, executor = make(Setting(400, 0, 8, 400, 0, "fcfs", False))
    ledger = Ledger()
    scheduler.add(replace(request, deadline=None), 0.0)
    while scheduler.has_work:
        ledger.take(scheduler.update(executor.run(scheduler.schedule())))
    return ledger.answer(request)


def check_micro_batch(scheduler: Scheduler, outputs: deque[StepOutput]) -> None:
    """The newest plan computes no sequence whose last token another plan in flight samples."""
    *earlier, newest = scheduler._in_flight
    for step, output in zip(earlier, outputs, strict=True):
        sampling = [step.owners[one.row] for one in output.sampled if one.tokens or one.beams]
        again = [run.row for run in newest.plan.runs if newest.owners[run.row] in sampling]
        assert not again, f"rows {again} are in two plans in flight"


def drive(setting: Setting, workload: list[Arrival]) -> tuple[Scheduler, Ledger, list[Arrival]]:
    scheduler, executor = make(setting)
    ledger, served, step, pending = Ledger(), [], 0, list(workload)
    outputs: deque[StepOutput] = deque()  # not yet given to `update()`

    def cancel(while_running: bool) -> None:
        for arrival in served:
            if arrival.cancel_at and arrival.cancel_at[:2] == (step, while_running):
                ledger.take(scheduler.cancel(arrival.request.id, arrival.cancel_at[2]))

    slow = [each for each in (setting.store, setting.prefill_engines) if each]  # they end after the last request
    while pending or scheduler.has_work or outputs or not all(each.is_idle for each in slow):
        assert step < 5000, "the scheduler makes no progress"
        while pending and pending[0].step <= step:
            arrival = pending.pop(0)
            arrival.request.arrival = float(step)
            try:
                scheduler.add(arrival.request, float(step))
            except BadRequest:
                continue  # it could never have fit
            served.append(arrival)
        cancel(while_running=False)
        if setting.store and not outputs and step % 2 and (fetches := scheduler.plan_fetches()) is not None:
            ledger.take(scheduler.update(executor.run(fetches)))
            scheduler.check()
            if step % 4 == 1:  # some of them are read before the step
                setting.store.advance(scheduler, executor.host)
        if setting.num_blocks % 2 and scheduler.awaits_output:  # as an engine does
            executor.settle(outputs[0].step)
            ledger.take(scheduler.update(outputs.popleft()))
            scheduler.check()
            step += 1
            continue
        plan = scheduler.schedule()
        num_encoder_slots = sum(-(-admission.num_encoder_tokens // BLOCK) * BLOCK for admission in plan.admitted)
        room = setting.budget + (setting.draft_room if plan.num_drafts else 0)
        assert plan.num_tokens - num_encoder_slots <= room, "more tokens than the budget"
        assert plan.runs or not scheduler.groups.running.items or plan.retired or outputs, (
            "sequences run and none of them moves"
        )
        if setting.pipelined:
            check_micro_batch(scheduler, outputs)
        cancel(while_running=True)
        outputs.append(executor.run(plan))
        scheduler.step_time.record_step(plan.num_tokens, 0.1 + step % 5)  # the prefill budget varies
        while outputs and (not plan.runs or len(outputs) > setting.ahead):
            executor.settle(outputs[0].step)
            ledger.take(scheduler.update(outputs.popleft()))
        ledger.take(scheduler.expire(float(step)))
        for each in slow:
            each.advance(scheduler, executor.host)
        scheduler.check()
        step += 1
    return scheduler, ledger, served


def verify(setting: Setting, workload: list[Arrival]) -> Scheduler:
    """Serve the workload, and compare each answer with that of the request alone."""
    scheduler, ledger, served = drive(setting, workload)
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.held_blocks, stats.held_slots) == (0, 0, 0, 0), "something leaks"
    assert ledger.ended == {arrival.request.id for arrival in served}, "a request has no final event"
    for arrival in served:
        request = arrival.request
        expected, answer = alone(request), ledger.answer(request)
        assert sorted(answer) == list(range(request.params.n)), f"{request.id} misses a sample"
        wanted = request.params.prompt_logprobs is not None
        delivered = ledger.prompt_logprobs[request.id]
        cut = any(reason == "cancelled" for _, reason in answer.values())
        assert delivered == (len(request.prompt_ids) - 1 if wanted else 0) or cut
        assert delivered <= len(request.prompt_ids) - 1
        if request.params.best_of and arrival.cancel_at:
            continue  # which samples are the best depends on those that are left
        for sample, (tokens, reason) in answer.items():
            if reason == "cancelled":
                assert tokens == expected[sample][0][: len(tokens)], f"{request.id} was cancelled after wrong tokens"
            else:
                assert (tokens, reason) == expected[sample], f"{request.id} gave other tokens than alone"
    return scheduler


@settings(max_examples=rounds(120), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SETTINGS, arrivals())
def test_any_workload_gives_the_tokens_of_undisturbed_runs(setting: Setting, workload: list[Arrival]) -> None:
    verify(setting, workload)


def crowd(seed: int, max_tokens: int = 24) -> tuple[Setting, list[Arrival]]:
    """Many requests at once on a pool that holds about three of them."""
    rng = random.Random(seed)
    setting = Setting(
        num_blocks=rng.randint(12, 22),
        num_host_blocks=rng.choice([0, 8, 40]),
        max_num_seqs=rng.randint(4, 8),
        budget=rng.choice([8, 16, 64]),
        threshold=rng.choice([0, 0, 6]),
        policy=rng.choice(["fcfs", "priority", "fair"]),
        prefix_caching=rng.random() < 0.7,
        ahead=seed % 3,
        pipelined=seed % 5 > 2,
        num_drafts=rng.choice([0, 3, 6]),
        trees=seed % 2 > 0,
        unknown_trees=seed % 4 > 2,
    )
    workload = []
    for i in range(14):
        shape = rng.choice([{}, {"n": 3}, {"n": 1, "best_of": 3}, {"beam_width": rng.randint(2, 4), "n": 2}])
        params = SamplingParams(
            **shape,
            seed=rng.randint(0, 3),
            max_tokens=rng.randint(8, max_tokens),
            ignore_eos=rng.random() < 0.7,
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        prompt = [1, 2, 3, 4, 1, 2, 3, 4][: rng.randint(0, 8)] + [rng.randint(1, 3) for _ in range(rng.randint(1, 12))]
        request = Request(
            id=f"r{i}",
            prompt_ids=prompt,
            params=params,
            eos_ids=[EOS],
            salt=rng.choice(["", "", "s"]),
            priority=rng.randint(0, 2),
        )
        cancel = (rng.randint(0, 60), rng.random() < 0.5, rng.choice([None, 0, 1])) if rng.random() < 0.2 else None
        workload.append(Arrival(rng.randint(0, 10), request, cancel))
    return setting, sorted(workload, key=lambda arrival: arrival.step)


def test_crowded_pools_preempt_and_give_the_tokens_of_undisturbed_runs() -> None:
    stats = [verify(*crowd(seed)).stats() for seed in range(rounds(25))]
    assert sum(each.preemptions for each in stats) > 50
    accepted, computed = sum(each.accepted_tokens for each in stats), sum(each.draft_tokens for each in stats)
    assert 0.5 * computed < accepted < computed > 150


def test_states_are_those_of_the_position_that_a_run_continues() -> None:
    preemptions = hits = 0
    for seed in range(rounds(25)):
        setting, workload = crowd(seed)
        stats = verify(replace(setting, has_states=True), workload).stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hits
    assert preemptions > 100 and hits > 30


def test_states_in_slots_are_those_of_the_position_that_a_run_continues() -> None:
    preemptions = hits = accepted = 0
    for seed in range(rounds(25)):
        setting, workload = crowd(seed)
        slots = {"num_slots": (3, 7, 12, 40)[seed % 4], "num_host_slots": (0, 1, 20)[seed % 3]}
        stats = verify(replace(setting, **slots), workload).stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hits
        accepted += stats.accepted_tokens
    assert preemptions > 25 and hits > 10 and accepted > 250


def test_checkpoints_in_slots_of_their_own_are_those_of_the_position_that_a_run_continues() -> None:
    preemptions = hits = 0
    for seed in range(rounds(20)):
        setting, workload = crowd(seed)
        slots = {"num_slots": (3, 7, 12, 40)[seed % 4], "num_checkpoint_slots": (1, 4, 9, 30)[seed % 4]}
        slots |= {"num_host_slots": (0, 1, 20)[seed % 3], "small_host_slots": seed % 2}
        stats = verify(replace(setting, **slots), workload).stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hits
    assert preemptions > 25 and hits > 10, (preemptions, hits)


def test_encoder_inputs_are_computed_whole_and_shared_whole() -> None:
    """Prompts become encoder inputs, and most of them are longer than a step's budget."""
    preemptions = hits = 0
    for seed in range(rounds(25)):
        setting, workload = crowd(seed)
        for number, arrival in enumerate(workload):
            params = replace(arrival.request.params, prompt_logprobs=None)
            source, start_ids = [1 + number % 3] * (4 + 7 * (number % 3)), [1, 2][: 1 + seed % 2]
            arrival.request = replace(arrival.request, prompt_ids=source, params=params, start_ids=start_ids)
        stats = verify(replace(setting, num_blocks=setting.num_blocks + 6, budget=8), workload).stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hits
    assert preemptions > 25 and hits > 25


def test_windows_let_sequences_outgrow_the_pool() -> None:
    """A sequence of 60 tokens takes 15 blocks, and there are about as many for all: what is behind the window is free
    again while it runs, and its prefix can still be gone on from."""
    preemptions = hits = outgrown = 0
    for seed in range(rounds(40)):
        setting, workload = crowd(seed, max_tokens=43)
        setting = replace(setting, num_blocks=10, budget=8, window=3 + seed % 7, max_num_seqs=3 + seed % 3)
        stats = verify(setting, workload).stats()
        preemptions += stats.preemptions
        hits += stats.prefix_hits
        longest = max(len(a.request.prompt_ids) + (a.request.params.max_tokens or 0) for a in workload)
        outgrown += longest > setting.num_blocks * BLOCK
    assert preemptions > 50 and hits > 50 and outgrown > 10
