"""How far a download is, and who is told."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY = 0.1  # seconds

ProgressUpdate = Callable[[int], None]  # with the bytes that have come so far


class DownloadProgress:
    """Nobody is told."""

    @contextmanager
    def of(self, what: str, total: int, sha256: str = "") -> Iterator[ProgressUpdate]:
        """While `what` is downloaded: `total` bytes, of which the largest file has the digest."""
        yield lambda done: None


class TerminalProgress(DownloadProgress):
    """One line on stderr. On a terminal it is rewritten; elsewhere only the start and the end are told."""

    @contextmanager
    def of(self, what: str, total: int, sha256: str = "") -> Iterator[ProgressUpdate]:
        live = sys.stderr.isatty()
        started = told = time.monotonic()

        def update(done: int) -> None:
            nonlocal told
            now = time.monotonic()
            if not live or now - told < _EVERY:
                return
            told = now
            done = min(done, total)  # what is measured may hold a little more than the file
            bar = "━" * (30 * done // max(total, 1))
            rate = done / max(now - started, _EVERY)
            _write(f"\r{what} {bar:30} {done / 1e6:.0f}/{total / 1e6:.0f} MB {rate / 1e6:.1f} MB/s\033[K")

        if not live:
            _write(f"{what}: {total / 1e6:.0f} MB\n")
        try:
            yield update
        finally:
            if live:
                _write("\r\033[K")
        _write(f"{what}: done in {time.monotonic() - started:.1f} s\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
