"""What an engine computed in each step, when, and how long it took: a file that it writes while it serves."""

import struct
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from quire.planning.step_times import StepWork

_WORK = len(fields(StepWork))
_TOLD = struct.Struct("<2d3q")
_STEP = struct.Struct(f"<{_WORK + 4}q4d")  # the numbers of a StepWork, and those of a LoggedStep


@dataclass(frozen=True, slots=True)
class LoggedStep:
    work: StepWork
    began: float  # time.perf_counter(), which all processes share
    seconds: float
    goes_on: bool = True  # the engine has more to do: the time until the next step is what its loop takes
    num_new: int = 0  # requests that the engine's loop took, beside others it had, since it ended the step before
    num_admitted: int = 0  # requests whose first step this is
    num_ended: int = 0  # requests whose last step this is
    waited: float = 0.0  # seconds that the engine's loop waited for a GPU
    on_device: float = 0.0  # seconds that a GPU worked on it; 0: not known

    @property
    def ended(self) -> float:
        return self.began + self.seconds

    def packed(self) -> bytes:
        counts = self.goes_on, self.num_new, self.num_admitted, self.num_ended
        return _STEP.pack(*astuple(self.work), *counts, self.began, self.seconds, self.waited, self.on_device)


def read_steps(path: Path, since: float = 0.0) -> list[LoggedStep]:
    """The steps of a log that began after `since`."""
    data = path.read_bytes()
    rows = _STEP.iter_unpack(data[: len(data) // _STEP.size * _STEP.size])
    return [step for step in map(_step_of, rows) if step.began >= since]


def _step_of(row: tuple[Any, ...]) -> LoggedStep:
    goes_on, num_new, num_admitted, num_ended, *seconds = row[_WORK:]
    work = StepWork(*row[:_WORK])
    began, took, waited, on_device = seconds
    return LoggedStep(work, began, took, bool(goes_on), num_new, num_admitted, num_ended, waited, on_device)


@dataclass(frozen=True, slots=True)
class Told:
    """What a server did with messages of its engine that were there together."""

    began: float  # time.perf_counter()
    seconds: float
    num_messages: int
    num_tokens: int  # of all streams
    num_writes: int  # streams that had some

    def packed(self) -> bytes:
        return _TOLD.pack(*astuple(self))


def read_told(path: Path, since: float = 0.0) -> list[Told]:
    """What the server did after `since`. `path`: of the steps."""
    data = path.with_name(path.name + ".server").read_bytes()
    rows = _TOLD.iter_unpack(data[: len(data) // _TOLD.size * _TOLD.size])
    return [told for told in (Told(*row) for row in rows) if told.began >= since]
