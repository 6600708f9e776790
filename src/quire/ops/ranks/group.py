"""The ranks of one machine, and the memory that they have in common: a file without a name, which goes with them."""

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from quire.ops.compiled import native

MAX_BYTES = 2**40  # of address space; memory is taken where something is written
ALIGNMENT = 2**16  # a multiple of every page size
CONTROL_BYTES = ALIGNMENT  # of barriers and heartbeats


def new_shared_memory() -> int:
    """A file that the processes of all ranks inherit."""
    file = os.memfd_create("ranks")
    os.ftruncate(file, MAX_BYTES)
    return file


class RankGroup:
    """One rank. All ranks allocate the same sizes in the same order, and so get the same memory."""

    def __init__(self, file: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._file = file
        self._end = 0
        self.native = native.RankGroup(self.allocate(CONTROL_BYTES), rank, size)

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeros at first."""
        length = -(-nbytes // ALIGNMENT) * ALIGNMENT
        memory = mmap.mmap(self._file, length, offset=self._end)
        self._end += length
        return np.frombuffer(memory, np.uint8)

    def counters(self) -> NDArray[np.int64]:
        """One for each rank, which it alone writes."""
        return self.allocate(8 * self.size).view(np.int64)[: self.size]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if not self.native.barrier():
            raise native.RankLost("another rank is gone")
