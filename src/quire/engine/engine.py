"""The loop: schedule, run, update. While a step runs, the next one is planned if the executor takes plans ahead."""

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.errors import QuireError, UnknownModel, Unsupported
from quire.core.kv_events import KVEvents
from quire.core.plan import StepPlan
from quire.core.records import SchedulerStats, StepRecord
from quire.core.request import Request, SequenceEvent
from quire.core.snapshot import Snapshot
from quire.engine.compile_queue import CompileQueue
from quire.engine.live_snapshots import LiveSnapshots
from quire.engine.options import EngineOptions
from quire.engine.scheduler_for import scheduler_for
from quire.engine.transfers import transfers_of
from quire.executors.protocol import Executor
from quire.ipc.active_work import STEP, ActiveWork, RequestSample
from quire.runtime.adapters import LoadedAdapter
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.grammar.matcher import CompiledGrammar

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

FETCH_WAIT = 0.002  # seconds between looks at messages while sequences wait for the disk alone
MAX_READ_SECONDS = 0.05  # of fetches that a step waits for, so that their sequences are in it
READ_SHARE = 0.5  # of the time of a step that it may wait for them
PREFILL_WAIT = 0.25  # seconds between steps while all sequences wait for other engines; news comes at once
SAVE_INTERVAL = 0.02  # seconds between looks at the disk while an idle engine has blocks to save
SAVE_TIMEOUT = 2.0  # seconds that the last blocks have to get to the disk
GC_THRESHOLD = 100_000  # new objects before garbage is collected: more than a step makes


@dataclass(slots=True)
class _StepInFlight:
    plan: StepPlan
    admitted: list[str]
    samples: list[RequestSample]  # whose work it is
    schedule_seconds: float
    submitted: float
    gap: float  # from the end of the step before, if this one could not be planned earlier


class Engine:
    """Implements `EngineLoop`: a scheduler and an executor. One thread; ids in, ids out; no text but grammars."""

    def __init__(
        self,
        executor: Executor,
        options: EngineOptions,
        tokenizer: "Callable[[], Tokenizer] | None" = None,
        refuse: Callable[[Request, QuireError], None] | None = None,
        active_work: ActiveWork | None = None,
    ) -> None:
        """`tokenizer` is called for the first request with structured output; without it, such requests are refused.
        With `refuse`, grammars are compiled in a thread, and it is called with requests whose grammar is wrong; without
        it, `submit` compiles and raises. `active_work` is told the requests of the steps in flight."""
        self.executor = executor
        self.capacity = executor.allocate(executor.load())
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer, self.capacity.vocab_size)
        if self.grammars is not None:
            executor.set_matcher_factory(self.grammars.matcher)
        self.compile_queue = CompileQueue(self.grammars, active_work) if self.grammars and refuse else None
        self._refuse = refuse
        self._active_work = active_work
        self._samples: list[RequestSample] = []  # of the last plan
        self._sample_rows: list[int] = []  # their rows
        _collect_garbage_rarely()
        self.record: StepRecord | None = None
        self._recorded_plan: StepPlan | None = None  # of the record, until the scheduler has learnt from it
        self._recorded_gap = 0.0  # before it
        self._in_flight: deque[_StepInFlight] = deque()
        self._stopped = False
        self._collected = 0.0  # when the last step ended
        self._step_seconds = MAX_READ_SECONDS / READ_SHARE  # of the last one
        self._only_waits = False  # the last plan had no runs, while blocks are on their way between engines
        self._live: LiveSnapshots | None = None  # while the engine is watched
        self.adapters: set[str] = set()  # keys that requests may name
        self._grammars: dict[str, CompiledGrammar] = {}  # of requests in flight: stay compiled as long as they are used
        self._scheduler = scheduler_for(executor, self.capacity, options)
        # For outputs, before it plans: micro-batches fill a pipeline, and drafts are verified together.
        self._may_wait = self.capacity.micro_batches > 1 or (
            self.capacity.drafts is not None and executor.store is None
        )
        # Steps with drafts do not overlap: the next one is submitted before the caller reads the events of the last.
        self._drafts_ahead = (
            self.capacity.drafts is not None
            and self.capacity.ahead == self.capacity.micro_batches == 1
            and executor.store is None
            and executor.transfer is None
        )
        self._transfers = transfers_of(self._scheduler, executor, self.capacity.vocab_size)
        self._store = executor.store if self._scheduler.tiers else None
        self._kv_events: KVEvents | None = None
        if (events := options.kv_events) is not None:
            from quire.engine.kv_publisher import KVPublisher

            self._kv_events = self._scheduler.kv_blocks.tree.listener = KVEvents()
            if self._scheduler.tiers is not None:
                self._scheduler.tiers.tell(self._kv_events)
            self._kv_publisher = KVPublisher(events, options.block_size)

    @property
    def has_work(self) -> bool:
        has_news = self._transfers is not None and self._transfers.has_news
        return (
            self._scheduler.has_work or bool(self._in_flight) or self._has_compiled or self._can_save_more or has_news
        )

    @property
    def _can_save_more(self) -> bool:
        """Whether the disk has caught up, and blocks waited for that."""
        return self._store is not None and self._store.has_done and self._waits_to_save

    @property
    def _waits_for_disk(self) -> bool:
        return self._scheduler.tiers is not None and self._scheduler.tiers.has_waiting

    @property
    def _waits_to_save(self) -> bool:
        return self._scheduler.tiers is not None and self._scheduler.tiers.waits_to_save

    def submit(self, request: Request) -> None:
        """Raises a QuireError if the request can never be served. One whose grammar is not compiled yet waits."""
        if request.adapter and request.adapter not in self.adapters:
            raise UnknownModel(f"no adapter `{request.adapter}` is loaded", param="model")
        structured = request.params.structured
        if self.grammars is None and request.params.needs_masks:
            raise Unsupported("this engine has no tokenizer, and structured output needs it")
        if structured is None or self.grammars is None:
            self._scheduler.add(request, time.monotonic())
        elif self.compile_queue is not None and self.grammars.find(structured) is None:
            self.compile_queue.add(request)
        else:
            self._add_structured(request, self.grammars.compile(structured))

    def _add_structured(self, request: Request, grammar: CompiledGrammar) -> None:
        self._scheduler.add(request, time.monotonic())
        self._grammars[request.id] = grammar

    def cancel(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        if self._live:
            self._live.changed()
        if self.compile_queue is not None and self.compile_queue.cancel(request_id, index):
            return []
        events = self._scheduler.cancel(request_id, index)
        self._release_grammars(events)
        return events

    def step(self) -> list[SequenceEvent]:
        self.record, begin = None, time.perf_counter()
        events = self._admit_compiled() if self._has_compiled else []
        now = time.monotonic()
        if self._store is not None:  # before waits end: what came while a step ran is there
            self._scheduler.take_transfers(self._store.take_done(), now)
            if self._kv_events is not None:
                self._kv_publisher.publish(self._kv_events.take())
        if expired := self._scheduler.expire(now):
            self._release_grammars(expired)
            events += expired
        if self._transfers is not None:
            self._transfers.update()
        if self._store is not None and not self._in_flight:
            events += self._fetch_first()
        if self._can_plan:
            has_runs = self._submit_plan(begin)
            if has_runs and len(self._in_flight) <= self.capacity.ahead:
                return events
            if not has_runs and len(self._in_flight) == 1 and self._store is not None and self._waits_for_disk:
                self._store.wait(FETCH_WAIT)  # there is nothing else to do
            elif not has_runs and self._transfers is not None and self._transfers.waits:
                self._transfers.wait(FETCH_WAIT)
        if not self._in_flight:
            return events
        events += self._collect()
        if self._drafts_ahead and not self._in_flight and self._can_plan:
            # The device works while the caller reads the events.
            self._submit_plan(time.perf_counter(), ended=self._collected)
        if self._recorded_plan is not None and self.record is not None:
            self._scheduler.record_step(self._recorded_plan, self.record.run_seconds, self._recorded_gap)
            self._recorded_plan = None
        return events

    @property
    def _can_plan(self) -> bool:
        return self._scheduler.has_work and not (self._may_wait and self._scheduler.awaits_output)

    def _submit_plan(self, begin: float, ended: float = 0.0) -> bool:
        """`begin`: when the step began. `ended`: when the one before did, if this one waited for it. -> whether there
        is something to compute"""
        plan = self._scheduler.schedule()
        scheduled = time.perf_counter()
        if self._live:
            self._live.planned(plan)
        admitted = [self._scheduler.rows[admission.row].group.id for admission in plan.admitted]
        samples = self._note_active_work([run.row for run in plan.runs], bool(plan.admitted))
        self.executor.submit(plan)
        gap = scheduled - ended if ended else 0.0
        self._in_flight.append(_StepInFlight(plan, admitted, samples, scheduled - begin, scheduled, gap))
        return bool(plan.runs)

    def _fetch_first(self) -> list[SequenceEvent]:
        """Let sequences that wait for blocks on disk be in the next plan, where reading takes a moment only: else they
        would wait for a whole step that begins without them."""
        assert self._store is not None
        plan = self._scheduler.plan_fetches()
        if plan is None:
            return []
        self.executor.submit(plan)
        events = self._scheduler.update(self.executor.collect())
        most = min(MAX_READ_SECONDS, READ_SHARE * self._step_seconds)
        if self._store.read_seconds(0) <= most:
            end = time.monotonic() + most
            while self._waits_for_disk and (left := end - time.monotonic()) > 0:
                self._store.wait(left)
                self._scheduler.take_transfers(self._store.take_done(), time.monotonic())
        return events

    def _collect(self) -> list[SequenceEvent]:
        """Finish the oldest step in flight."""
        step = self._in_flight.popleft()
        output = self.executor.collect()
        if self._active_work is not None and not self._in_flight:
            self._active_work.clear(STEP)
        ran = time.perf_counter()
        events = self._scheduler.update(output)
        if self._kv_events is not None:
            self._kv_publisher.publish(self._kv_events.take())
        if self._transfers is not None:
            events = self._transfers.without_own(events)
        if self._grammars:
            self._release_grammars(events)
        self._only_waits = self._transfers is not None and not step.plan.runs and not events
        if (self._store is not None or self._transfers is not None) and not step.plan.runs and not events:
            return events  # at most, it moved blocks
        self.record = StepRecord(
            step=step.plan.step,
            num_tokens=step.plan.num_tokens,
            num_drawn=sum(len(row.tokens) for row in output.sampled),
            num_drafts=step.plan.num_drafts,
            schedule_seconds=step.schedule_seconds,
            run_seconds=ran - max(step.submitted, self._collected),
            update_seconds=time.perf_counter() - ran,
            scheduler=self._scheduler.stats(),
            admitted=step.admitted,
        )
        self._collected, self._step_seconds = ran, self.record.run_seconds
        self._recorded_plan, self._recorded_gap = step.plan, step.gap
        if self._live:
            self._live.ran(self.record)
        return events

    def _note_active_work(self, rows: list[int], admitted: bool) -> list[RequestSample]:
        """Note who has these rows, and whose steps are in flight. `admitted`: rows have new owners. -> their samples"""
        if self._active_work is None:
            return []
        if admitted or rows != self._sample_rows:  # else they are the same as in the last step
            owners = [self._scheduler.rows[row] for row in rows]
            self._samples, self._sample_rows = [(seq.group.id, seq.sample) for seq in owners], rows
        samples = self._samples
        for step in self._in_flight:
            if step.samples is not self._samples:
                samples = samples + step.samples
        self._active_work.write(STEP, samples)
        return self._samples

    def save_blocks(self) -> None:
        """Let full blocks go on to the next tier, where no request is in flight whose steps would do it."""
        if not self._scheduler.groups.has_work and not self._in_flight:
            while self._scheduler.has_work or self._can_save_more:
                self.step()

    def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        end = time.monotonic() + SAVE_TIMEOUT
        self.save_blocks()
        while self._store is not None and self._waits_to_save and time.monotonic() < end:
            self._store.wait(FETCH_WAIT)
            self.save_blocks()
        if self._kv_events is not None:
            self._kv_publisher.close()
        self.executor.stop()

    # -- structured output

    @property
    def _has_compiled(self) -> bool:
        return self.compile_queue is not None and self.compile_queue.ready

    def _admit_compiled(self) -> list[SequenceEvent]:
        """Hand requests whose grammar has been compiled to the scheduler."""
        assert self.compile_queue is not None and self._refuse is not None
        events: list[SequenceEvent] = []
        for pending in self.compile_queue.take():
            request = pending.request
            try:
                if pending.error is not None:
                    raise pending.error
                assert pending.grammar is not None
                self._add_structured(request, pending.grammar)
            except QuireError as error:
                self._refuse(request, error)
                continue
            for index in pending.cancelled:
                events += self.cancel(request.id, index)
        return events

    def _release_grammars(self, events: list[SequenceEvent]) -> None:
        """Drop the grammars of requests that have ended."""
        for event in events:
            if event.final:
                self._grammars.pop(event.request_id, None)

    # -- LoRA adapters, between steps

    def add_adapter(self, key: str, loaded: LoadedAdapter) -> None:
        self.executor.add_adapter(key, loaded)
        self.adapters.add(key)
        if self._scheduler.tiers:
            self._scheduler.tiers.adapters[key] = loaded.digest
        if self._transfers is not None:
            self._transfers.adapters[key] = loaded.digest

    def remove_adapter(self, key: str) -> None:
        """No request in flight may use it."""
        self.adapters.remove(key)
        if self._transfers is not None:
            self._transfers.adapters.pop(key, None)
        self.executor.remove_adapter(key)

    def uses_adapter(self, key: str) -> bool:
        compiling = self.compile_queue is not None and self.compile_queue.uses_adapter(key)
        return compiling or self._scheduler.uses(key)

    # -- seen from outside

    def reset_prefix_cache(self, tenant: str = "") -> bool:
        """Forget the prefixes of a tenant. -> whether none is left: requests in flight keep theirs"""
        if self._live:
            self._live.changed()
        is_empty = self._scheduler.reset_prefix_cache(tenant)
        if self._kv_events is not None:
            self._kv_publisher.publish(self._kv_events.take())
        return is_empty

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def watch(self, on: bool) -> None:
        if on and self._live:
            self._live.changed()
        else:
            self._live = LiveSnapshots(self._scheduler) if on else None

    def snapshot(self) -> Snapshot | None:
        return self._live.take() if self._live else None

    @property
    def idle_timeout(self) -> float | None:
        if self._only_waits and self._transfers is not None and self._transfers.waits and not self._transfers.has_news:
            return PREFILL_WAIT  # the last plan had nothing to compute
        if self.has_work:
            return 0.0
        if self._waits_to_save:
            return SAVE_INTERVAL
        return self._live.seconds_until_due if self._live else None


def _collect_garbage_rarely() -> None:
    """Steps make thousands of objects and drop them without cycles. The collector's default, every 700 objects, would
    go through the tokens of all requests and stop all streams for 80 ms."""
    gc.collect()
    gc.freeze()  # what is here stays
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
