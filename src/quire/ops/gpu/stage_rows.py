"""Hidden states on their way between a GPU and memory of the host that the processes of neighbouring stages map."""

import logging
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.gpu.hidden_states import GpuHiddenStates
from quire.ops.gpu.pinned import PORTABLE_AND_MAPPED
from quire.ops.opset import Int32, StepBatch

log = logging.getLogger("quire.gpu")


class HostRows:
    """Rows [n, columns] in that memory, in the type that the device computes in. They are pinned for a GPU, so that
    copies go on beside the host."""

    def __init__(self, rows: NDArray[Any], dtype: torch.dtype, device: torch.device) -> None:
        """`rows`: of a type of the same size, since numpy has no bfloat16."""
        self.tensor = torch.from_numpy(rows).view(dtype)
        if device.type == "cuda":
            _pin(self.tensor, self)

    def take(self, rows: Tensor, first: int) -> Callable[[], None]:
        """Queue a copy of the device's rows to those from `first` on. Call the result to wait until they are there."""
        target = self.tensor[first : first + len(rows)]
        assert target.dtype == rows.dtype, f"hidden states are {rows.dtype}, and a stage expects {target.dtype}"
        target.copy_(rows, non_blocking=True)
        if not rows.is_cuda:
            return lambda: None
        copied = torch.cuda.Event()
        copied.record()
        return lambda: copied.synchronize()


@dataclass(frozen=True, slots=True, eq=False)
class FetchedHiddenStates(GpuHiddenStates):
    """Every step copies its rows from the host, to the first rows here."""

    host: HostRows
    first_rows: Int32  # 0, 1, ...

    @classmethod
    def of(cls, host: HostRows, max_tokens: int, device: torch.device) -> "FetchedHiddenStates":
        rows = torch.zeros(max_tokens, host.tensor.shape[1], dtype=host.tensor.dtype, device=device)
        return cls(rows, host, np.arange(max_tokens, dtype=np.int32))

    def fetch(self, batch: StepBatch) -> StepBatch:
        if batch.hidden_rows is None:  # a dry run
            return batch
        count, first = len(batch.hidden_rows), int(batch.hidden_rows[0])
        self.rows[:count].copy_(self.host.tensor[first : first + count], non_blocking=True)
        return replace(batch, hidden_rows=self.first_rows[:count])

    def wait(self) -> None:
        """Until the steps so far are computed: the rows on the host may be overwritten."""
        if self.rows.is_cuda:
            torch.cuda.current_stream().synchronize()


def _pin(memory: Tensor, owner: object) -> None:
    """Until `owner` is collected. Memory that cannot be pinned is copied all the same, while the host waits."""
    failure = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, PORTABLE_AND_MAPPED))
    if not failure:
        weakref.finalize(owner, _unpin, memory).atexit = False  # the finalizer holds the memory
        return
    log.warning("memory between stages could not be pinned (CUDA error %d): copies are slower", failure)
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # takes the error, which the next launch would raise


def _unpin(memory: Tensor) -> None:
    torch.cuda.synchronize()  # a copy may be in flight
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
