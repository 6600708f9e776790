"""The loop: schedule, run, update. While a step runs, the next one is planned if the executor takes plans ahead."""

import gc
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.core.errors import UnknownModel, Unsupported
from quire.core.limits import SchedulerLimits
from quire.core.plan import StepPlan
from quire.core.records import SchedulerStats, StepRecord
from quire.core.request import Request, SequenceEvent
from quire.core.scheduler import Scheduler
from quire.core.snapshot import Snapshot
from quire.engine.live_snapshots import LiveSnapshots
from quire.engine.options import EngineOptions
from quire.executors.protocol import Executor
from quire.runtime.adapters import LoadedAdapter
from quire.text.grammar.compiler import Grammar, GrammarCompiler

if TYPE_CHECKING:
    from quire.text.tokenizers.tokenizer import Tokenizer

NEW_OBJECTS = 100_000  # before garbage is looked for: more than a step makes


@dataclass(slots=True)
class _Launched:
    plan: StepPlan
    admitted: list[str]
    schedule_seconds: float
    begin: float


class Engine:
    """A scheduler and an executor. One thread; ids in, ids out; no text but that of languages to answer in."""

    def __init__(
        self, executor: Executor, options: EngineOptions, tokenizer: "Callable[[], Tokenizer] | None" = None
    ) -> None:
        """`tokenizer` is asked for when an answer has to be in a language; without it, such requests are refused."""
        self.executor = executor
        self.capacity = executor.start()
        self.grammars = None if tokenizer is None else GrammarCompiler(tokenizer, self.capacity.vocab_size)
        if self.grammars is not None:
            executor.guide(self.grammars.matcher)
        _leave_garbage_alone()
        self.record: StepRecord | None = None  # of the step that ended in the last call of step(), if one did
        self._launched: deque[_Launched] = deque()
        self._collected = 0.0  # when the last step ended
        self._watch: LiveSnapshots | None = None  # while somebody looks
        self.adapters: set[str] = set()  # that requests may ask for
        self._languages: dict[str, Grammar] = {}  # of requests under way: compiled as long as they are needed
        self._scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                long_prefill_token_threshold=options.long_prefill_token_threshold,
                step_seconds=(options.target_itl_ms or 0) / 1000,
                block_size=options.block_size,
                max_model_len=self.capacity.max_model_len,
                seq2seq=self.capacity.seq2seq,
                max_queued=sys.maxsize,  # who submits decides how much may wait
            ),
            self.capacity.num_blocks,
            num_host_blocks=self.capacity.num_host_blocks,
            policy=options.scheduling_policy,
            prefix_caching=options.enable_prefix_caching,
            ahead=self.capacity.ahead,
            window=self.capacity.window,
            num_adapters=options.num_loras,
            drafts=self.capacity.drafts,
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._launched)

    def submit(self, request: Request) -> None:
        """Raises a QuireError if the request could never be served. Its language, if it has one and is not known yet,
        is compiled meanwhile."""
        if request.adapter and request.adapter not in self.adapters:
            raise UnknownModel(f"no adapter `{request.adapter}` is loaded", param="model")
        structured = request.params.structured
        if structured is None:
            self._scheduler.add(request, time.monotonic())
            return
        if self.grammars is None:
            raise Unsupported("this engine has no tokenizer, and an answer in a language needs it")
        grammar = self.grammars.compile(structured)
        self._scheduler.add(request, time.monotonic())
        self._languages[request.id] = grammar

    def cancel(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        """Free what the request (or one sample of it) holds. One that has ended or never was is no error."""
        if self._watch:
            self._watch.changed()
        return self._forget_ended(self._scheduler.cancel(request_id, index))

    def step(self) -> list[SequenceEvent]:
        """Give the executor its next plan. Unless it takes more, wait for the oldest, and tell what came of it."""
        self.record, begin = None, time.perf_counter()
        events = self._forget_ended(self._scheduler.expire(time.monotonic()))
        if self._scheduler.has_work:
            plan = self._scheduler.schedule()
            scheduled = time.perf_counter()
            if self._watch:
                self._watch.planned(plan)
            self.executor.submit(plan)
            admitted = [self._scheduler.rows[admission.row].group.id for admission in plan.admitted]
            self._launched.append(_Launched(plan, admitted, scheduled - begin, scheduled))
            if plan.runs and len(self._launched) <= self.capacity.ahead:
                return events
        return events + self._collect() if self._launched else events

    def add_adapter(self, key: str, loaded: LoadedAdapter) -> None:
        """What the executor has loaded. Between steps, as below."""
        self.executor.add_adapter(key, loaded)
        self.adapters.add(key)

    def remove_adapter(self, key: str) -> None:
        """No request under way may use it."""
        self.adapters.remove(key)
        self.executor.remove_adapter(key)

    def uses_adapter(self, key: str) -> bool:
        return self._scheduler.uses(key)

    def _forget_ended(self, events: list[SequenceEvent]) -> list[SequenceEvent]:
        if self._languages:
            for event in events:
                if event.final:
                    self._languages.pop(event.request_id, None)
        return events

    def _collect(self) -> list[SequenceEvent]:
        step = self._launched.popleft()
        output = self.executor.collect()
        ran = time.perf_counter()
        events = self._forget_ended(self._scheduler.update(output))
        self.record = StepRecord(
            step=step.plan.step,
            num_tokens=step.plan.num_tokens,
            num_drawn=sum(len(drawn.tokens) for drawn in output.sampled),
            num_drafts=step.plan.num_drafts,
            schedule_seconds=step.schedule_seconds,
            run_seconds=ran - max(step.begin, self._collected),
            update_seconds=time.perf_counter() - ran,
            scheduler=self._scheduler.stats(),
            admitted=step.admitted,
        )
        self._collected = ran
        self._scheduler.record_step(step.plan, self.record.run_seconds)
        if self._watch:
            self._watch.ran(self.record)
        return events

    # ---- seen from outside

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def watch(self, on: bool) -> None:
        """Whether somebody looks. While nobody does, it costs nothing."""
        if on and self._watch:
            self._watch.changed()
        else:
            self._watch = LiveSnapshots(self._scheduler) if on else None

    def snapshot(self) -> Snapshot | None:
        """What is to be shown now, if anything is."""
        return self._watch.take() if self._watch else None

    @property
    def patience(self) -> float | None:
        """Seconds until the next call of step() or snapshot() has something to do; None: until a message comes."""
        if self.has_work:
            return 0.0
        return self._watch.patience if self._watch else None

    def stop(self) -> None:
        self.executor.stop()


def _leave_garbage_alone() -> None:
    """Steps make thousands of objects and drop them without cycles. Looking for cycles every 700 of them means going
    through the tokens of all requests, which stops all streams for 80 ms."""
    gc.collect()
    gc.freeze()  # what is here stays
    gc.set_threshold(NEW_OBJECTS, *gc.get_threshold()[1:])
