"""One line on stderr that says how far a download is."""

import sys
import time
from types import TracebackType

_EVERY = 0.1  # seconds


class Progress:
    """On a terminal the line is rewritten; elsewhere only the start and the end are told."""

    def __init__(self, what: str, total: int, *, shown: bool) -> None:
        self._what, self._total = what, total
        self._shown = shown
        self._live = shown and sys.stderr.isatty()
        self._started = self._told = time.monotonic()

    def __enter__(self) -> "Progress":
        if self._shown:
            self._write("" if self._live else f"{self._what}: {self._total / 1e6:.0f} MB\n")
        return self

    def update(self, done: int) -> None:
        now = time.monotonic()
        if not self._live or now - self._told < _EVERY:
            return
        self._told = now
        done = min(done, self._total)  # what is measured may hold a little more than the file
        filled = 30 * done // self._total
        rate = done / max(now - self._started, _EVERY)
        bar = "━" * filled + " " * (30 - filled)
        self._write(f"\r{self._what} {bar} {done / 1e6:.0f}/{self._total / 1e6:.0f} MB {rate / 1e6:.1f} MB/s\033[K")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._write("\r\033[K")
        if self._shown and kind is None:
            self._write(f"{self._what}: done in {time.monotonic() - self._started:.1f} s\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
