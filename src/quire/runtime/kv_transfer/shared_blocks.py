"""Host blocks and host slots in memory that another process maps: a sealed file, passed over a Unix socket."""

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.runtime.kv_transfer.wire import Buffers, PeerError

try:
    import fcntl

    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
except (ImportError, AttributeError):  # no Linux: blocks go through the socket
    SEALS = 0


def can_share() -> bool:
    return hasattr(os, "memfd_create") and SEALS != 0


def new_shared_file(num_bytes: int) -> int:
    """A file that neither side can cut: a mapping of it never ends before its size."""
    file = os.memfd_create("kv-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(file, num_bytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
    return file


class SharedBlocks:
    """The host blocks of another engine, in its file, and host slots behind them."""

    def __init__(self, file: int, block_bytes: int, num_blocks: int, slot_bytes: int = 0) -> None:
        """Raises PeerError if it is no such file. It may be closed then."""
        size = os.fstat(file).st_size
        size_of_slots = size - num_blocks * block_bytes
        if not can_share() or fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise PeerError("the file of shared memory can be cut")
        if (
            not size
            or num_blocks < 0
            or size_of_slots < 0
            or (size_of_slots % slot_bytes if slot_bytes else size_of_slots)
        ):
            raise PeerError(
                f"the file of shared memory has {size} bytes, {num_blocks} blocks {block_bytes} each, and a state "
                f"{slot_bytes}"
            )
        memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        self.blocks: NDArray[Any] = memory[: size - size_of_slots].reshape(num_blocks, block_bytes)
        self.slots: NDArray[Any] = memory[size - size_of_slots :].reshape(-1, max(slot_bytes, 1))

    def holds(self, ids: Sequence[int], num_states: int) -> bool:
        """Whether the last `num_states` of these are host slots, and the others host blocks."""
        first, end, last = len(self.blocks), len(self.blocks) + len(self.slots), len(ids) - num_states
        blocks, slots = ids[:last], ids[last:]
        return all(0 <= block < first for block in blocks) and all(first <= slot < end for slot in slots)

    def write(self, host: int, payload: Buffers) -> None:
        first, offset = len(self.blocks), 0
        target = self.blocks[host] if host < first else self.slots[host - first]
        for buffer in payload:
            target[offset : offset + buffer.nbytes] = buffer.reshape(-1)
            offset += buffer.nbytes
