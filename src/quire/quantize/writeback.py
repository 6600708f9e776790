"""The disk writes what there is while more is computed: fsync then waits for the rest alone."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

SYNC_FILE_RANGE_WRITE = 2  # of Linux: start to write, and do not wait


class Writeback:
    """A thread that has the system write ranges of files, in order. fsync tells of errors."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._start = getattr(libc, "sync_file_range", None)  # other systems begin when they see fit
        if self._start is not None:
            self._start.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        self._pool = ThreadPoolExecutor(1, "writeback")

    def begin(self, file: int, offset: int, num_bytes: int) -> None:
        """Blocks nobody but the thread, where the disk is busy."""
        if self._start is not None:
            self._pool.submit(self._start, file, offset, num_bytes, SYNC_FILE_RANGE_WRITE)

    def close(self) -> None:
        """Before the files are."""
        self._pool.shutdown(cancel_futures=True)
