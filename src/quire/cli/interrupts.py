"""Ctrl-C that stops an answer and leaves the engine consistent."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType


@contextmanager
def first_interrupt_noted() -> Iterator[Event]:
    """Within, the first Ctrl-C only sets the event: a step in flight is finished, and the engine stays
    consistent. The second one raises KeyboardInterrupt as usual, for an engine that takes too long."""
    noted = Event()

    def note(signum: int, frame: FrameType | None) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
