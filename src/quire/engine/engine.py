"""The loop: schedule, run, update."""

import sys
import time

from quire.core.limits import Limits
from quire.core.records import StepRecord
from quire.core.request import Request, SequenceEvent
from quire.core.scheduler import Scheduler
from quire.engine.options import EngineOptions
from quire.executors.protocol import Executor


class Engine:
    """A scheduler and an executor. One thread; ids in, ids out; no text."""

    def __init__(self, executor: Executor, options: EngineOptions) -> None:
        self.executor = executor
        self.capacity = executor.start()
        self.record: StepRecord | None = None  # of the last step
        self._scheduler = Scheduler(
            Limits(
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                long_prefill_token_threshold=options.long_prefill_token_threshold,
                block_size=options.block_size,
                max_model_len=self.capacity.max_model_len,
                max_queued=sys.maxsize,  # who submits decides how much may wait
            ),
            self.capacity.num_blocks,
            num_host_blocks=self.capacity.num_host_blocks,
            policy=options.scheduling_policy,
            prefix_caching=options.enable_prefix_caching,
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Raises a QuireError if the request could never be served."""
        self._scheduler.add(request, time.monotonic())

    def cancel(self, request_id: str, index: int | None = None) -> list[SequenceEvent]:
        """Free what the request (or one sample of it) holds. One that has ended or never was is no error."""
        return self._scheduler.cancel(request_id, index)

    def step(self) -> list[SequenceEvent]:
        scheduler, begin = self._scheduler, time.perf_counter()
        events = scheduler.expire(time.monotonic())
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        output = self.executor.run(plan)
        ran = time.perf_counter()
        events += scheduler.update(output)
        num_drawn = sum(len(drawn.tokens) for drawn in output.drawn)
        self.record = StepRecord(
            step=plan.step,
            num_tokens=plan.num_tokens,
            num_drawn=num_drawn,
            schedule_seconds=scheduled - begin,
            run_seconds=ran - scheduled,
            update_seconds=time.perf_counter() - ran,
            scheduler=scheduler.stats(),
        )
        return events

    def stop(self) -> None:
        self.executor.stop()
