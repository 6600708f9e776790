"""Streams that go on at another worker, or through another gateway: what was delivered, and the wrapper that the next
worker gets."""

import os
import time
from hashlib import blake2b
from typing import Any

import msgspec

from quire.core.errors import BadRequest
from quire.gateway.event_scanner import EventScanner
from quire.gateway.wire import ClientRequest

RESUME_HEADER = b"x-quire-resume"  # as the server has it
MARK = b": quire "  # begins the comment that tells the tokens of the events before it

MAX_SKIPPED = 1 << 20  # tokens


class DeliveredStream(msgspec.Struct):
    """The answer, whichever workers make it: its id, time and seed, and the tokens that are with the client."""

    id: str
    seed: int
    created: int
    events: list[list[int]] = []
    num_tokens: int = 0  # of these events
    num_skipped: int = 0  # first tokens that the client has from another connection
    tells_ids: bool = False  # each event is told with the number of tokens up to its end

    @classmethod
    def begin(cls) -> "DeliveredStream":
        drawn = os.urandom(24)
        return cls(drawn[:16].hex(), int.from_bytes(drawn[16:]) >> 1, int(time.time()))

    @classmethod
    def named(cls, tenant: str, request_id: str, body: bytes, num_skipped: int) -> "DeliveredStream":
        """The stream of a client that names its request: every gateway gives the same request the same seed, so the
        same tokens come again when the client comes back through another one."""
        digest = blake2b(repr((tenant, request_id)).encode() + body, digest_size=24).digest()
        seed = int.from_bytes(digest[16:]) >> 1
        return cls(digest[:16].hex(), seed, int(time.time()), num_skipped=num_skipped, tells_ids=True)

    def tell(self, tokens: list[int]) -> None:
        self.events.append(tokens)
        self.num_tokens += len(tokens)

    def wrap(self, body: bytes) -> bytes:
        resume: dict[str, Any] = {"id": self.id, "created": self.created, "seed": self.seed, "events": self.events}
        return msgspec.json.encode({"resume": resume, "body": msgspec.Raw(body)})


class ResumableScanner(EventScanner):
    """Passes on events only together with their tokens, so that what the client has is always known exactly."""

    def __init__(self, delivered: DeliveredStream, drop_usage: bool) -> None:
        super().__init__(is_sse=True, drop_usage=drop_usage)
        self._delivered = delivered
        self._untold: list[bytes] = []  # events whose tokens have not been told
        self.has_lost_place = False  # the client has a part of an event

    def feed(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        for event in super().feed(data).split(b"\n\n")[:-1]:
            if event.startswith(MARK):
                passed += self._told([int(token) for token in event[len(MARK) :].split(b",")])
            elif event.startswith(b":") and not self._untold:
                passed.append(event)  # a comment that keeps the connection alive
            else:
                self._untold.append(event)
        self.num_events = self._delivered.num_tokens
        return b"".join(event + b"\n\n" for event in passed)

    def _told(self, tokens: list[int]) -> list[bytes]:
        """-> the events that have these tokens, unless the client has them already"""
        delivered, events = self._delivered, self._untold
        self._untold, before = [], delivered.num_tokens
        delivered.tell(tokens)
        if before < delivered.num_skipped:
            self.has_lost_place = self.has_lost_place or delivered.num_tokens > delivered.num_skipped
            return []
        if delivered.tells_ids and events:
            events[-1] = b"id: %d\n" % delivered.num_tokens + events[-1]
        return events

    def rest(self) -> bytes:
        """The bytes that end the stream: nothing is sent behind them."""
        untold, self._untold = self._untold, []
        return b"".join(event + b"\n\n" for event in untold) + super().rest()

    @property
    def is_short(self) -> bool:
        """The client says that it has more than there is."""
        return self._delivered.num_tokens < self._delivered.num_skipped

    @property
    def was_sent_away(self) -> bool:
        """The worker has ended the stream because it shuts down."""
        return not self.has_ended and any(b'"code":"unavailable"' in event for event in self._untold)

    def break_off(self) -> None:
        """The worker is gone: what it did not tell the tokens of comes again from the next one."""
        self._untold = []
        super().rest()


def delivered_stream(request: ClientRequest, request_id: str, tenant: str, can_resume: bool) -> DeliveredStream | None:
    """The stream that goes on when a worker dies. With a request id of the client, through another gateway, too."""
    num_skipped = read_last_event_id(request.header(b"last-event-id"))
    is_named = request.header(b"x-request-id") == request_id
    if num_skipped and not (can_resume and is_named):
        message = "Last-Event-ID is for a stream of one chat or completion, asked for with an x-request-id"
        raise BadRequest(message, "send the request as before, with the same x-request-id")
    if not can_resume:
        return None
    return DeliveredStream.named(tenant, request_id, request.body, num_skipped) if is_named else DeliveredStream.begin()


def read_last_event_id(value: str) -> int:
    """How many tokens a client has that comes back. Raises BadRequest."""
    if not value:
        return 0
    if not (value.isascii() and value.isdigit() and len(value) < 8 and int(value) <= MAX_SKIPPED):
        raise BadRequest(f"the header Last-Event-ID is {value[:40]!r}", "send the last `id` that the stream had")
    return int(value)
