"""How responses look on the wire: errors, statuses, and the frames of a stream."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.errors import QuireError

ErrorShape = Callable[[QuireError], object]  # an error -> the body that tells it; its return type is the schema


@dataclass(frozen=True, slots=True)
class WireFormat:
    error: ErrorShape
    frame: Callable[[object], bytes]  # one streamed object, as bytes
    status: Callable[[QuireError], int] = lambda error: error.status
    media_type: str = "text/event-stream"
    last: bytes = b""  # ends a stream that succeeded
    keep_alive: bytes = b""  # sent on a silent stream, and ignored by clients
