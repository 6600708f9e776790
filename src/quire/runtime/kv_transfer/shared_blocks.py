"""Host blocks in memory that another process maps: a sealed file without a name, passed over a Unix socket."""

import mmap
import os
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
    """The host blocks of another engine, in its file."""

    def __init__(self, file: int, block_bytes: int) -> None:
        """Raises PeerError if it is no such file. It may be closed then."""
        size = os.fstat(file).st_size
        if not can_share() or fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise PeerError("the file of shared memory can be cut")
        if not size or size % block_bytes:
            raise PeerError(f"the file of shared memory has {size} bytes, and a block {block_bytes}")
        self._memory = mmap.mmap(file, size)
        self._blocks: NDArray[Any] = np.frombuffer(self._memory, np.uint8).reshape(-1, block_bytes)

    def __len__(self) -> int:
        return len(self._blocks)

    def write(self, block: int, payload: Buffers) -> None:
        target, offset = self._blocks[block], 0
        for buffer in payload:
            target[offset : offset + buffer.nbytes] = buffer.reshape(-1)
            offset += buffer.nbytes
