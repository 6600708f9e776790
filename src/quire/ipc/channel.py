"""Messages between two processes that share a pair of sockets.

Neither end ever waits: not until the other has read what was sent, and not for the rest of a message that has begun to
come."""

import contextlib
import socket
import struct

HEADER = struct.Struct("<I")  # before every message: how many bytes it has
AT_ONCE = 2**18  # bytes read with one call


class Channel:
    """One end. Whoever has it looks when it can be read from and, while `behind`, when it can be written to."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.ended = False  # nothing will come any more

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def behind(self) -> bool:
        """Something that was sent is still here: `flush` once it can be written."""
        return bool(self._outgoing)

    def send(self, message: bytes) -> None:
        """To one that is gone, nothing is sent: `receive` notices it."""
        self._outgoing += HEADER.pack(len(message))
        self._outgoing += message
        self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._end.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()

    def receive(self) -> list[bytes]:
        """All messages that have come."""
        while not self.ended:
            try:
                data = self._end.recv(AT_ONCE)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._incoming += data
            if len(data) < AT_ONCE:
                break
        return self._cut()

    def _cut(self) -> list[bytes]:
        messages, at = [], 0
        while len(self._incoming) >= at + HEADER.size:
            [size] = HEADER.unpack_from(self._incoming, at)
            begin, end = at + HEADER.size, at + HEADER.size + size
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[begin:end]))
            at = end
        del self._incoming[:at]
        return messages

    def finish(self) -> None:
        """Say that nothing more is sent. What the other end has to say still comes."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self, patience: float = 0.0) -> None:
        """What was sent has so many seconds to leave."""
        with contextlib.suppress(OSError):
            if self._outgoing and patience:
                self._end.settimeout(patience)
                self._end.sendall(self._outgoing)
        self._end.close()
