"""Progress of a download."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_REFRESH_SECONDS = 0.1

ProgressUpdate = Callable[[int], None]  # called with the bytes downloaded so far


class DownloadProgress:
    """Reports nothing. Subclasses override `track`."""

    @contextmanager
    def track(self, what: str, total: int, sha256: str = "") -> Iterator[ProgressUpdate]:
        """While `what` is downloaded: `total` bytes; `sha256` is the digest of the largest file."""
        yield lambda done: None


class TerminalProgress(DownloadProgress):
    """One line on stderr. A terminal shows a progress bar; elsewhere, only the start and the end are printed."""

    @contextmanager
    def track(self, what: str, total: int, sha256: str = "") -> Iterator[ProgressUpdate]:
        live = sys.stderr.isatty()
        started = last_refresh = time.monotonic()

        def update(done: int) -> None:
            nonlocal last_refresh
            now = time.monotonic()
            if not live or now - last_refresh < _REFRESH_SECONDS:
                return
            last_refresh = now
            done = min(done, total)  # the measured directory may hold a little more than the files
            bar = "━" * (30 * done // max(total, 1))
            rate = done / max(now - started, _REFRESH_SECONDS)
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
