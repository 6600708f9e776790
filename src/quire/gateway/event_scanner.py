"""The events of a streamed response on their way through: passed on whole, counted, and read for usage."""

from quire.gateway.usage import MARKS, TokenUsage, read_usage

DONE = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")  # ends a stream of OpenAI's
MAX_EVENT_BYTES = 4 << 20  # a longer one is passed on in pieces


def is_comment(data: bytes) -> bool:
    """Whether it is nothing but comments of a stream of events."""
    return data.startswith(b":") and all(line[:1] in (b":", b"") for line in data.splitlines())


class EventScanner:
    """`drop_usage`: the event with the usage was asked for by the gateway, so the client does not get it."""

    def __init__(self, is_sse: bool, drop_usage: bool = False) -> None:
        self._delimiter = b"\n\n" if is_sse else b"\n"
        self.is_sse, self._drop_usage = is_sse, drop_usage
        self._tail = b""
        self.num_events = 0
        self.usage: TokenUsage | None = None
        self.has_ended = False  # the event that ends the stream came

    def feed(self, data: bytes) -> bytes:
        """-> whole events"""
        if self._tail:
            data, self._tail = self._tail + data, b""
        cut = data.rfind(self._delimiter)
        if cut < 0 and self.is_sse and b"\r\n\r\n" in data:
            self._delimiter = b"\r\n\r\n"
            cut = data.rfind(self._delimiter)
        if cut < 0:
            if len(data) > MAX_EVENT_BYTES:
                return data
            self._tail = data
            return b""
        cut += len(self._delimiter)
        if cut < len(data):
            self._tail = data[cut:]
            data = data[:cut]
        self.num_events += data.count(self._delimiter)
        if any(mark in data for mark in MARKS):
            data = self._read(data)
        if data.endswith(DONE):
            self.has_ended = True
            self.num_events -= 1
        return data

    def rest(self) -> bytes:
        """The bytes that came behind the last whole event."""
        rest, self._tail = self._tail, b""
        return rest

    def _read(self, data: bytes) -> bytes:
        kept = []
        for event in data.split(self._delimiter)[:-1]:
            usage = read_usage(self._payload(event))
            if usage is not None:
                self.usage = self.usage or TokenUsage()
                self.usage.merge(usage)
                if self._drop_usage and b'"choices":[]' in event.replace(b" ", b""):
                    self.num_events -= 1
                    continue
            kept.append(event + self._delimiter)
        return b"".join(kept)

    def _payload(self, event: bytes) -> bytes:
        if not self.is_sse:
            return event
        return b"\n".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
