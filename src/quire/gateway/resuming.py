"""Streams that go on at another worker: what was delivered, and the wrapper that the next worker gets."""

import random
import time
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from quire.gateway.event_scanner import EventScanner

RESUME_HEADER = b"x-quire-resume"  # as the server has it
MARK = b": quire "  # begins the comment that tells the tokens of the events before it

_rng = random.SystemRandom()


@dataclass(slots=True)
class DeliveredStream:
    """The answer, whichever workers make it: its id, time and seed, and the tokens that are with the client."""

    id: str = field(default_factory=lambda: uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    seed: int = field(default_factory=lambda: _rng.getrandbits(63))
    events: list[list[int]] = field(default_factory=list)

    def wrap(self, body: bytes) -> bytes:
        resume: dict[str, Any] = {"id": self.id, "created": self.created, "seed": self.seed, "events": self.events}
        return msgspec.json.encode({"resume": resume, "body": msgspec.Raw(body)})


class ResumableScanner(EventScanner):
    """Passes on events only together with their tokens, so that what the client has is always known exactly."""

    def __init__(self, delivered: DeliveredStream, drop_usage: bool) -> None:
        super().__init__(is_sse=True, drop_usage=drop_usage)
        self._delivered = delivered
        self._untold: list[bytes] = []  # events whose tokens have not been told

    def feed(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        for event in super().feed(data).split(b"\n\n")[:-1]:
            if event.startswith(MARK):
                self._delivered.events.append([int(token) for token in event[len(MARK) :].split(b",")])
                passed += self._untold
                self._untold = []
            elif event.startswith(b":") and not self._untold:
                passed.append(event)  # a comment that keeps the connection alive
            else:
                self._untold.append(event)
        self.num_events = sum(map(len, self._delivered.events))
        return b"".join(event + b"\n\n" for event in passed)

    def rest(self) -> bytes:
        """What ends the stream: nothing more is told behind it."""
        untold, self._untold = self._untold, []
        return b"".join(event + b"\n\n" for event in untold) + super().rest()

    @property
    def was_sent_away(self) -> bool:
        """The worker has ended the stream because it shuts down."""
        return not self.has_ended and any(b'"code":"unavailable"' in event for event in self._untold)

    def break_off(self) -> None:
        """The worker is gone: what it did not tell the tokens of comes again from the next one."""
        self._untold = []
        super().rest()
