"""What an engine computed in each step, when, and how long it took: a file that it writes while it serves."""

import struct
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from quire.planning.step_times import StepWork

_WORK = len(fields(StepWork))
_STEP = struct.Struct(f"<{_WORK + 2}q2d")  # the numbers of a StepWork, goes_on, num_new, began, seconds


@dataclass(frozen=True, slots=True)
class LoggedStep:
    work: StepWork
    began: float  # time.perf_counter(), which all processes share
    seconds: float
    goes_on: bool = True  # the engine has more to do: the time until the next step is what its loop takes
    num_new: int = 0  # requests that the engine's loop took, beside others it had, since it ended the step before

    @property
    def ended(self) -> float:
        return self.began + self.seconds

    def packed(self) -> bytes:
        return _STEP.pack(*astuple(self.work), self.goes_on, self.num_new, self.began, self.seconds)


def read_steps(path: Path, since: float = 0.0) -> list[LoggedStep]:
    """The steps of a log that began after `since`."""
    data = path.read_bytes()
    rows = _STEP.iter_unpack(data[: len(data) // _STEP.size * _STEP.size])
    steps = [LoggedStep(StepWork(*row[:_WORK]), *row[-2:], bool(row[_WORK]), row[_WORK + 1]) for row in rows]
    return [step for step in steps if step.began >= since]
