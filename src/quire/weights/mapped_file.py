"""A file's bytes, mapped into memory and never copied."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from quire.core.errors import BadCheckpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


CHUNK = 4 << 20  # bytes that are asked for at once
AHEAD = 256 << 20  # bytes behind those that are looked at which are on their way from the disk meanwhile
_reader = ThreadPoolExecutor(1, "read-ahead")  # asking for more than the disk's queue holds waits for the disk


class MappedFile:
    """The mapping lives as long as this object or any array viewed from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # what mmap says to an empty file
            raise BadCheckpoint(f"{path} is empty", "download it again") from error
        self.size = len(self.buffer)
        self._asked: set[int] = set()  # chunks

    def forget(self) -> None:
        """Unmap the pages that were looked at; the next look maps them again."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def rows(self, offset: int, num_rows: int, row_bytes: int) -> "NDArray[np.uint8]":
        """-> uint8 [num_rows, row_bytes], read-only. The caller has checked that they lie inside the file."""
        import numpy as np  # here, so that reading a header, as the HTTP process does, costs no numpy

        assert offset >= 0 and offset + num_rows * row_bytes <= self.size
        if num_rows * row_bytes == 0:  # frombuffer has no empty views
            return np.empty((num_rows, row_bytes), np.uint8)
        self._ask_for(offset, offset + num_rows * row_bytes + AHEAD)
        flat = np.frombuffer(self.buffer, np.uint8, num_rows * row_bytes, offset)
        return flat.reshape(num_rows, row_bytes)

    def _ask_for(self, begin: int, end: int) -> None:
        """Read from the disk, without waiting for it. Pages that are mapped and looked at would come one by one."""
        for chunk in range(begin // CHUNK, (min(end, self.size) - 1) // CHUNK + 1):
            if chunk not in self._asked:
                self._asked.add(chunk)
                length = min(CHUNK, self.size - chunk * CHUNK)
                _reader.submit(self.buffer.madvise, mmap.MADV_WILLNEED, chunk * CHUNK, length)
