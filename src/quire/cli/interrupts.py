"""Ctrl-C that stops an answer without tearing the engine apart."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType


@contextmanager
def first_interrupt_noted() -> Iterator[Event]:
    """Within, the first Ctrl-C only sets the event: a step that is under way is finished, and the engine stays whole.
    The second one is for an engine that takes too long, and raises KeyboardInterrupt as usual."""
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
