"""The events of responses in the background, kept for clients that come back to a stream."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable

from quire.core.errors import QuireError

MAX_BYTES = 16 << 20  # of the events of one tenant


class EventsGone(QuireError):
    """Events are dropped before the response is."""

    status, code = 400, "events_gone"

    @classmethod
    def before(cls, first: int) -> "EventsGone":
        hint = "ask for the response without stream"
        return cls(f"the events before {first} are no longer kept", hint, param="starting_after")


class EventJournal:
    """The frames of one stream so far. `follow` yields them, then the rest as it comes."""

    def __init__(self, grown: Callable[["EventJournal"], None] = lambda journal: None) -> None:
        self.first = 0  # number of the oldest frame that is kept
        self.num_bytes = 0
        self._frames: list[bytes] = []
        self._ended = False
        self._changed = asyncio.Event()
        self._grown = grown

    def add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.num_bytes += len(frame)
        self._grown(self)
        self._wake()

    def end(self) -> None:
        self._ended = True
        self._wake()

    def forget(self) -> None:
        """Drop all frames so far."""
        self.first += len(self._frames)
        self._frames.clear()
        self.num_bytes = 0

    async def follow(self, index: int) -> AsyncGenerator[bytes, None]:
        """From frame `index` on: existing frames in one part, then new ones as they come."""
        while True:
            if index < self.first:
                raise EventsGone.before(self.first)
            if frames := self._frames[index - self.first :]:
                index += len(frames)
                yield b"".join(frames)
            elif self._ended:
                return
            else:
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class TenantJournals:
    """The journals of one tenant. When they exceed `max_bytes` together, the oldest one drops its frames."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._open: OrderedDict[EventJournal, int] = OrderedDict()  # journal -> bytes counted for it
        self._num_bytes = 0

    def new(self) -> EventJournal:
        return EventJournal(self._grown)

    def forget(self, journal: EventJournal) -> None:
        self._num_bytes -= self._open.pop(journal, 0)
        journal.forget()

    def _grown(self, journal: EventJournal) -> None:
        self._num_bytes += journal.num_bytes - self._open.get(journal, 0)
        self._open[journal] = journal.num_bytes
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._open)))
