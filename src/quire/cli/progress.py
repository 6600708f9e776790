"""A progress line on stderr: what is done, how much of it, and the time that is left."""

import sys
import time
from types import TracebackType

REFRESH_SECONDS = 0.1
WIDTH = 30


class ProgressLine:
    """On a terminal, a bar that is drawn again and again; elsewhere, one line when a phase ends."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet, self._live = quiet, sys.stderr.isatty()
        self._phase, self._started, self._drawn = "", 0.0, 0.0

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and not self._quiet:
            self._write("\r\033[K")

    def update(self, phase: str, done: float, total: float) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._started, self._drawn = phase, now, 0.0
        seconds = now - self._started
        if done >= total:
            self._end(f"{phase}: {seconds:.1f} s")
        elif self._live and not self._quiet and now - self._drawn >= REFRESH_SECONDS:
            self._drawn = now
            share = done / max(total, 1)
            left = f"{format_seconds(seconds / share - seconds)} left" if share > 0.01 else ""
            self._write(f"\r{phase} {'━' * int(WIDTH * share):{WIDTH}} {100 * share:3.0f} % {left}\033[K")

    def note(self, text: str) -> None:
        """A line that stays, above the bar."""
        self._end(text)

    def _end(self, text: str) -> None:
        if not self._quiet:
            self._write(f"\r{text}\033[K\n" if self._live else f"{text}\n")

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def format_seconds(seconds: float) -> str:
    """Such as 9 s, 3:05 or 1:02:03."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
