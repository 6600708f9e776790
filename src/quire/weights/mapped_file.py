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


CHUNK_BYTES = 4 << 20  # read at once: two huge pages, which is what Linux reads when one is touched
READAHEAD_BYTES = 512 << 20  # read from the disk beyond what is used now
HUGEPAGE, POPULATE_READ = 14, 22  # madvise of Linux; other systems refuse it. Python 3.11 has no name for the second


class MappedFile:
    """The mapping lives as long as this object or any array viewed from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:  # mmap refuses an empty file
            raise BadCheckpoint(f"{path} is empty", "download it again") from error
        self.size = len(self.buffer)
        self.next: MappedFile | None = None  # the file that is read after this
        self._requested: set[int] = set()  # chunks that are read, or in the queue
        _advise(self.buffer, HUGEPAGE, 0, self.size)

    def drop_pages(self) -> None:
        """Unmap the pages that were read; the next access maps them again."""
        self.buffer.madvise(mmap.MADV_DONTNEED)

    def rows(self, offset: int, num_rows: int, row_bytes: int) -> "NDArray[np.uint8]":
        """-> uint8 [num_rows, row_bytes], read-only. The caller has checked that they lie inside the file."""
        import numpy as np  # here, because the HTTP process reads headers without numpy

        assert offset >= 0 and offset + num_rows * row_bytes <= self.size
        if num_rows * row_bytes == 0:  # frombuffer has no empty views
            return np.empty((num_rows, row_bytes), np.uint8)
        self._read_ahead(offset, offset + num_rows * row_bytes + READAHEAD_BYTES)
        flat = np.frombuffer(self.buffer, np.uint8, num_rows * row_bytes, offset)
        return flat.reshape(num_rows, row_bytes)

    def _read_ahead(self, begin: int, end: int) -> None:
        """Prefetch from the disk, without waiting. Without it, every access would fault in one page."""
        for chunk in range(begin // CHUNK_BYTES, (min(end, self.size) - 1) // CHUNK_BYTES + 1):
            if chunk not in self._requested:
                self._requested.add(chunk)
                offset = chunk * CHUNK_BYTES
                _readahead_queue().put((self.buffer, offset, min(CHUNK_BYTES, self.size - offset)))
        if end > self.size and self.next is not None:
            self.next._read_ahead(0, end - self.size)


def chained(files: Iterable[MappedFile]) -> list[MappedFile]:
    """The files without duplicates, in reading order: prefetching goes on from the end of a file into the next."""
    chain = list(dict.fromkeys(files))
    for file, following in pairwise(chain):
        file.next = following
    return chain


@cache
def _readahead_queue() -> "SimpleQueue[tuple[mmap.mmap, int, int]]":
    """The chunks that a daemon thread reads, in order."""
    queue: SimpleQueue[tuple[mmap.mmap, int, int]] = SimpleQueue()

    def read_ahead() -> None:
        while True:
            _read_chunk(*queue.get())

    Thread(target=read_ahead, name="read-ahead", daemon=True).start()
    return queue


def _read_chunk(buffer: mmap.mmap, offset: int, length: int) -> None:
    """Touching a chunk reads huge pages, which take a tenth of the time of small ones to fill, map and unmap, and
    waits. WILLNEED then requests, in small pages, what the system has not read."""
    _advise(buffer, POPULATE_READ, offset, min(length, mmap.PAGESIZE))
    _advise(buffer, mmap.MADV_DONTNEED, offset, length)
    _advise(buffer, mmap.MADV_WILLNEED, offset, length)


def _advise(buffer: mmap.mmap, advice: int, offset: int, length: int) -> None:
    with suppress(OSError):
        buffer.madvise(advice, offset, length)
