"""Messages between two processes over a pair of sockets: a length, then the bytes. Neither end ever blocks."""

import contextlib
import socket
import struct

HEADER = struct.Struct("<I")  # before every message: its length in bytes
RECEIVE_BYTES = 2**18  # read with one call


class Channel:
    """One end. Its owner polls it for reading and, while `has_unsent`, for writing."""

    def __init__(self, end: socket.socket, max_message_bytes: int = 2**32) -> None:
        """A longer message ends the channel."""
        self._max_message_bytes = max_message_bytes
        end.setblocking(False)
        self._end = end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.ended = False  # the other end is closed

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def has_unsent(self) -> bool:
        """Some of what was sent is still here: `flush` when the socket is writable."""
        return bool(self._outgoing)

    def send(self, message: bytes) -> None:
        """Nothing happens if the other end is closed: `receive` notices it."""
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
        """All complete messages that have arrived."""
        while not self.ended:
            try:
                data = self._end.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._incoming += data
            if len(data) < RECEIVE_BYTES:
                break
        return self._split()

    def _split(self) -> list[bytes]:
        messages, offset = [], 0
        while len(self._incoming) >= offset + HEADER.size:
            [size] = HEADER.unpack_from(self._incoming, offset)
            if size > self._max_message_bytes:
                self.ended = True
                break
            begin, end = offset + HEADER.size, offset + HEADER.size + size
            if len(self._incoming) < end:
                break
            messages.append(bytes(self._incoming[begin:end]))
            offset = end
        del self._incoming[:offset]
        return messages

    def finish(self) -> None:
        """Send nothing more. What the other end sends still arrives."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def close(self, timeout: float = 0.0) -> None:
        """Unsent bytes have `timeout` seconds to leave."""
        with contextlib.suppress(OSError):
            if self._outgoing and timeout:
                self._end.settimeout(timeout)
                self._end.sendall(self._outgoing)
        self._end.close()
