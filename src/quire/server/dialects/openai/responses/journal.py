"""Events of responses in the background, kept for those who come back to a stream."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable

from quire.core.errors import QuireError

MAX_BYTES = 16 << 20  # of the events of one tenant


class EventsGone(QuireError):
    """They were many, or are long past. The response itself may still be there."""

    status, code = 400, "events_gone"

    @classmethod
    def before(cls, first: int) -> "EventsGone":
        hint = "ask for the response without stream"
        return cls(f"the events before {first} are no longer kept", hint, param="starting_after")


class EventJournal:
    """What one stream has told so far, frame by frame. Those who follow it are told the rest as it comes."""

    def __init__(self, grown: Callable[["EventJournal"], None] = lambda journal: None) -> None:
        self.first = 0  # number of the oldest frame that is kept
        self.num_bytes = 0
        self._frames: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()
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
        """All frames so far."""
        self.first += len(self._frames)
        self._frames.clear()
        self.num_bytes = 0

    async def follow(self, at: int) -> AsyncGenerator[bytes, None]:
        """From frame `at` on: those that are there in one piece, then the others as they come."""
        while True:
            if at < self.first:
                raise EventsGone.before(self.first)
            if there := self._frames[at - self.first :]:
                at += len(there)
                yield b"".join(there)
            elif self._ended:
                return
            else:
                await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class TenantJournals:
    """Of one tenant. When they grow too large together, the one begun first forgets what it has."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._open: OrderedDict[EventJournal, int] = OrderedDict()  # journal -> its bytes, as they were counted
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
