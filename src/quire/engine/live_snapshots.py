"""Looking at the engine while it works, without slowing it down: a share of its time, and no more, goes into snapshots.

Nothing here is called while nobody looks."""

import os
import time
from collections import deque
from pathlib import Path

from quire.core.plan import StepPlan
from quire.core.records import StepRecord
from quire.core.scheduler import Scheduler
from quire.core.snapshot import Snapshot, StepView, step_view, take_snapshot

INTERVAL = 0.2  # seconds between snapshots, at least
SHARE = 0.005  # of the engine's time; where a snapshot takes long (a pool of 100,000 blocks), they come less often
MAX_STEPS = 500  # in one snapshot; the numbers of the steps tell of any that are left out


class LiveSnapshots:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._planned: deque[StepView] = deque()  # without an output yet
        self._steps: deque[StepView] = deque(maxlen=MAX_STEPS)
        self._num_preemptions = scheduler.num_preemptions
        self._spent = 0.0  # seconds since the last snapshot
        self._due = 0.0  # time.monotonic() of the next one
        self._news = True

    def planned(self, plan: StepPlan) -> None:
        begin, preempted = time.perf_counter(), []
        if self._scheduler.num_preemptions > self._num_preemptions:
            self._num_preemptions = self._scheduler.num_preemptions
            preempted = [seq.group.id for seq in self._scheduler.groups.waiting.items if seq.group.preempted]
        self._planned.append(step_view(plan, self._scheduler, preempted))
        self._spent += time.perf_counter() - begin

    def ran(self, record: StepRecord) -> None:
        self._news = True
        while self._planned and self._planned[0].step <= record.step:  # none, if it was planned unseen
            step = self._planned.popleft()
            step.ended, step.seconds = time.monotonic(), record.run_seconds
            self._steps.append(step)

    def changed(self) -> None:
        """Something happened outside of a step, or somebody else begins to look."""
        self._news = True

    @property
    def patience(self) -> float | None:
        """Seconds until there is something to show; None if that takes an event."""
        return max(self._due - time.monotonic(), 0.0) if self._news else None

    def take(self) -> Snapshot | None:
        """What there is to see, if it is time."""
        now, begin = time.monotonic(), time.perf_counter()
        if not self._news or now < self._due:
            return None
        seen = take_snapshot(self._scheduler, now=now, resident_bytes=_resident_bytes(), steps=list(self._steps))
        self._steps.clear()
        self._news = False
        self._spent += time.perf_counter() - begin
        self._due = now + max(INTERVAL, self._spent / SHARE)
        self._spent = 0.0
        return seen


def _resident_bytes() -> int:
    """0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
