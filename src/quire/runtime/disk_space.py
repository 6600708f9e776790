"""How much a directory of KV blocks holds. The least recently used files go first, whichever engine wrote them."""

import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from quire.runtime.kv_files import HEADER_BYTES, SUFFIX

KEPT = 15 / 16  # of the limit, after files were removed
COUNT_EVERY = 1 / 16  # of the limit, written since files were last counted: other engines write, too
STALE_SECONDS = 600  # after which a file that was never renamed belongs to no writer
MINUTE = 60 * 10**9  # nanoseconds
FILES_AT_ONCE = 64  # looked at before the other threads have their turn


class DiskSpace:
    """The files under `root`, of all models. Only one thread may call what removes."""

    def __init__(self, root: Path, folder: str, max_bytes: int) -> None:
        """`folder`: where this engine writes."""
        self._root, self._folder, self._max_bytes = root, folder, max_bytes
        self.own_bytes = 0  # of the blocks and states of this engine's model, without headers
        self._num_bytes = 0  # of all, when they were last counted and since
        self._uncounted = 0  # bytes written since

    @property
    def max_bytes(self) -> int:
        """The bytes that the directory may hold, or fewer, where its disk has not as much room."""
        try:
            free = shutil.disk_usage(self._root).free
        except OSError:
            return self._max_bytes
        return min(self._max_bytes, self._num_bytes + free)

    def touch(self, path: str) -> bool:
        """Make a file the most recently used one. -> whether it is there"""
        try:
            os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # a read-only directory
        return True

    def added(self, nbytes: int) -> None:
        self.own_bytes += nbytes
        self._num_bytes += nbytes + HEADER_BYTES
        self._uncounted += nbytes + HEADER_BYTES

    def make_room(self, nbytes: int) -> None:
        """Remove the least recently used files if there is no room for one of `nbytes`."""
        needed = nbytes + HEADER_BYTES
        if self._num_bytes + needed > self._max_bytes or self._uncounted > self._max_bytes * COUNT_EVERY:
            self.sweep(self._max_bytes - needed)

    def shrink(self) -> None:
        """The disk is full before the limit is reached: keep less."""
        self.sweep(int(self._num_bytes * KEPT))

    def sweep(self, max_bytes: int | None = None) -> None:
        """Count the files. If they are more than `max_bytes`, remove the least recently used ones, and some more.

        There may be a million. They are not all listed and sorted, which would take the memory, and stop the steps for
        as long: their bytes are counted by minute, and then those of the oldest minutes are looked at again."""
        used: Counter[int] = Counter()  # bytes, by the minute of their last use
        own_bytes = 0
        for moment, size, path in self._files():
            used[moment // MINUTE] += size
            own_bytes += size - HEADER_BYTES if path.startswith(self._folder) else 0
        self.own_bytes, self._num_bytes, self._uncounted = own_bytes, used.total(), 0
        limit = self._max_bytes if max_bytes is None else max_bytes
        if self._num_bytes <= limit:
            return
        removable = accumulate(used[minute] for minute in sorted(used))
        excess = self._num_bytes - limit * KEPT
        last = next((m for m, total in zip(sorted(used), removable, strict=True) if total >= excess), max(used))
        for _, size, path in sorted(each for each in self._files() if each[0] // MINUTE <= last):
            if self._num_bytes <= limit * KEPT:
                return
            self._num_bytes -= size
            self.remove(path, size - HEADER_BYTES)

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """(last used, bytes, path) of all blocks; stale temporary files are removed."""
        seen = 0
        for folder, _, names in os.walk(self._root):
            temporary = folder.endswith("/tmp")
            for name in names:
                seen += 1
                if seen % FILES_AT_ONCE == 0:
                    time.sleep(0.0005)  # a step may be waiting for the interpreter
                path = f"{folder}/{name}"
                try:
                    status = os.stat(path)  # noqa: PTH116
                except OSError:
                    continue
                if temporary and status.st_mtime < time.time() - STALE_SECONDS:
                    _unlink(path)
                elif not temporary and name.endswith(SUFFIX):
                    yield status.st_mtime_ns, status.st_size, path

    def remove(self, path: str, nbytes: int) -> None:
        """`nbytes`: of its payload."""
        if _unlink(path) and path.startswith(self._folder):
            self.own_bytes -= nbytes

    def clear(self, tenant: bytes, temporary: str) -> bool:
        """Remove the files of a tenant of this engine's model. -> whether none is left"""
        try:
            Path(temporary).parent.mkdir(parents=True, exist_ok=True)
            os.rename(f"{self._folder}/{tenant.hex()}", temporary)  # noqa: PTH104
        except FileNotFoundError:
            return True
        except OSError:
            return False
        shutil.rmtree(temporary, ignore_errors=True)
        self.sweep()
        return True


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return False
    return True
