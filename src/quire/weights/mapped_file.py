"""A file's bytes, mapped into memory and never copied."""

import mmap
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from quire.core.errors import BadCheckpoint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


CHUNK = 4 << 20  # bytes that are asked for at once: two large pages, which is what Linux reads where one is touched
AHEAD = 512 << 20  # bytes behind those that are looked at which are on their way from the disk meanwhile
HUGEPAGE, POPULATE_READ = 14, 22  # advice to Linux, which other systems refuse; Python 3.11 has no name for the second


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
        self.next: MappedFile | None = None  # the one that is looked at after this
        self._asked: set[int] = set()  # chunks
        _advise(self.buffer, HUGEPAGE, 0, self.size)

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
                _wanted().put((self.buffer, chunk * CHUNK, min(CHUNK, self.size - chunk * CHUNK)))
        if end > self.size and self.next is not None:
            self.next._ask_for(0, end - self.size)


def chained(files: Iterable[MappedFile]) -> list[MappedFile]:
    """Each once, in the order in which they are looked at: the next one is asked for before the last one ends."""
    chain = list(dict.fromkeys(files))
    for file, following in pairwise(chain):
        file.next = following
    return chain


@cache
def _wanted() -> "SimpleQueue[tuple[mmap.mmap, int, int]]":
    """What a thread reads, one after the other. It ends with the process, whatever is left."""
    queue: SimpleQueue[tuple[mmap.mmap, int, int]] = SimpleQueue()

    def read_ahead() -> None:
        while True:
            _bring(*queue.get())

    Thread(target=read_ahead, name="read-ahead", daemon=True).start()
    return queue


def _bring(buffer: mmap.mmap, offset: int, length: int) -> None:
    """Touched, a chunk comes in large pages, which take a tenth of the time of small ones to fill, map and unmap, and
    is waited for. What the system has not read then is asked for in small ones."""
    _advise(buffer, POPULATE_READ, offset, min(length, mmap.PAGESIZE))
    _advise(buffer, mmap.MADV_DONTNEED, offset, length)
    _advise(buffer, mmap.MADV_WILLNEED, offset, length)


def _advise(buffer: mmap.mmap, advice: int, offset: int, length: int) -> None:
    with suppress(OSError):
        buffer.madvise(advice, offset, length)
