"""Snapshots of the engine for those who watch it: a bounded share of its time. Unused while nobody watches."""

import os
import time
from collections import deque
from pathlib import Path

from quire.core.plan import StepPlan
from quire.core.records import StepRecord
from quire.core.scheduler import Scheduler
from quire.core.snapshot import Snapshot, StepView, step_view, take_snapshot

MIN_INTERVAL = 0.2  # seconds between snapshots
MAX_SHARE = 0.005  # of the engine's time; where a snapshot takes long (100,000 blocks), they come less often
MAX_STEPS = 500  # in one snapshot; step numbers show which are left out


class LiveSnapshots:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._planned: deque[StepView] = deque()  # without an output yet
        self._steps: deque[StepView] = deque(maxlen=MAX_STEPS)
        self._num_preemptions = scheduler.num_preemptions
        self._spent = 0.0  # seconds since the last snapshot
        self._due = 0.0  # time.monotonic() of the next one
        self._changed = True

    def planned(self, plan: StepPlan) -> None:
        begin, preempted = time.perf_counter(), []
        if self._scheduler.num_preemptions > self._num_preemptions:
            self._num_preemptions = self._scheduler.num_preemptions
            preempted = [seq.group.id for seq in self._scheduler.groups.waiting.items if seq.group.preempted]
        self._planned.append(step_view(plan, self._scheduler, preempted))
        self._spent += time.perf_counter() - begin

    def ran(self, record: StepRecord) -> None:
        self._changed = True
        while self._planned and self._planned[0].step <= record.step:  # none, if it was planned before the watch began
            step = self._planned.popleft()
            step.ended, step.seconds = time.monotonic(), record.run_seconds
            self._steps.append(step)

    def changed(self) -> None:
        """Something happened outside of a step, or another client begins to watch."""
        self._changed = True

    @property
    def seconds_until_due(self) -> float | None:
        """Seconds until the next snapshot is due; None: nothing has changed since the last."""
        return max(self._due - time.monotonic(), 0.0) if self._changed else None

    def take(self) -> Snapshot | None:
        """A snapshot, if it is due."""
        now, begin = time.monotonic(), time.perf_counter()
        if not self._changed or now < self._due:
            return None
        snapshot = take_snapshot(self._scheduler, now=now, resident_bytes=_resident_bytes(), steps=list(self._steps))
        self._steps.clear()
        self._changed = False
        self._spent += time.perf_counter() - begin
        self._due = now + max(MIN_INTERVAL, self._spent / MAX_SHARE)
        self._spent = 0.0
        return snapshot


def _resident_bytes() -> int:
    """0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
