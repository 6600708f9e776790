"""What a decode engine and a prefill engine say to each other: typed, bounded messages over a socket.

A frame is four bytes of length and msgpack. Between machines the bytes of a block follow their `BlockPayload`. On one
machine the decode engine passes a file of shared memory with its `Hello`, and blocks are written there instead."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from numpy import uint8
from numpy.typing import NDArray

from quire.core.transfer_config import UNIX

Buffers = Sequence[NDArray[uint8]]  # a block, in order

VERSION = 2
LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 2**24  # the tokens of the longest prompt take 5 bytes each
MAX_TEXT = 4096  # characters of a text field
CONNECT_TIMEOUT = 2.0  # seconds
SEND_TIMEOUT = 30.0  # seconds that an end may take no bytes
GREETING_TIMEOUT = 5.0  # seconds for the first message
GONE_SECONDS = 10  # after which a machine that acknowledges nothing counts as gone, also while nothing is asked
KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 1000 * GONE_SECONDS}


class PeerError(Exception):
    """The other end does not say what it should. The connection is closed."""


class Hello(msgspec.Struct, tag=True):
    """A decode engine's first message. The blocks of both engines must be alike in all of this."""

    version: int
    fingerprint: str  # of the model and of everything that decides the bits of its KV cache
    dtype: str
    block_size: int
    layout: str
    block_bytes: int
    state_bytes: int = 0  # of a model with state slots
    is_shared: bool = False  # a file with its host blocks, and host slots behind them, comes with this message
    num_host_blocks: int = 0  # in that file


class Welcome(msgspec.Struct, tag=True):
    """The prefill engine's answer to a Hello."""


class NotWelcome(msgspec.Struct, tag=True):
    """The answer to a Hello that the prefill engine cannot serve."""

    reason: str


class AskPrefill(msgspec.Struct, tag=True):
    id: int
    tokens: list[int]
    tenant: str
    salt: str
    adapter: str  # a digest of it; "": none
    first: int  # the first block that is wanted
    host_blocks: list[int]  # where they are written, the state last; without shared memory it is empty


class CancelPrefill(msgspec.Struct, tag=True):
    id: int


class PingPeer(msgspec.Struct, tag=True):
    """Say that you are there, between two steps."""


class PeerAnswered(msgspec.Struct, tag=True):
    """The answer to a PingPeer."""


class BlocksWritten(msgspec.Struct, tag=True):
    """The first blocks of a prefill are in the shared memory."""

    id: int
    count: int


class BlockPayload(msgspec.Struct, tag=True):
    """The next block of a prefill, or the state behind the last; its bytes follow."""

    id: int
    checksum: bytes


class PrefillEnded(msgspec.Struct, tag=True):
    """No more blocks of this prefill come."""

    id: int
    reason: str = ""  # why, if some are missing


ToProducer = Hello | AskPrefill | CancelPrefill | PingPeer
ToConsumer = Welcome | NotWelcome | PeerAnswered | BlocksWritten | BlockPayload | PrefillEnded

_encode = msgspec.msgpack.Encoder().encode
_TO_PRODUCER = msgspec.msgpack.Decoder[Any](ToProducer)
_TO_CONSUMER = msgspec.msgpack.Decoder[Any](ToConsumer)


class Wire:
    """One end of a connection. One thread receives; any thread may send."""

    def __init__(self, end: socket.socket, is_producer: bool) -> None:
        self._end, self._decoder = end, _TO_PRODUCER if is_producer else _TO_CONSUMER
        self._sending = threading.Lock()
        end.settimeout(None)
        self._set_timeout(socket.SO_SNDTIMEO, SEND_TIMEOUT)
        self._set_timeout(socket.SO_RCVTIMEO, GREETING_TIMEOUT)
        if end.family != socket.AF_UNIX:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):  # not every system has all of them
                    end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _set_timeout(self, option: int, seconds: float) -> None:
        self._end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

    def greeted(self) -> None:
        """From now on, the other end may be silent."""
        self._set_timeout(socket.SO_RCVTIMEO, 0.0)

    @property
    def is_local(self) -> bool:
        return self._end.family == socket.AF_UNIX

    def send(self, message: ToProducer | ToConsumer, payload: Buffers = (), file: int | None = None) -> None:
        """Raises OSError if the other end is gone, or takes nothing for SEND_TIMEOUT seconds."""
        text = _encode(message)
        parts = [memoryview(LENGTH.pack(len(text)) + text), *(buffer.data.cast("B") for buffer in payload)]
        with self._sending:
            if file is not None:
                sent = socket.send_fds(self._end, [parts[0]], [file])
                parts[0] = parts[0][sent:]
            while parts:
                sent = self._end.sendmsg(parts)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if parts:
                    parts[0] = parts[0][sent:]

    def receive(self) -> Any:
        """The next message; None when the other end is closed. Raises OSError or PeerError."""
        message, files = self.receive_with_file()
        for file in files:
            os.close(file)
        return message

    def receive_with_file(self) -> tuple[Any, list[int]]:
        """A message, and the files that came with it: the caller closes them."""
        files: list[int] = []
        header = bytearray(LENGTH.size)
        if self.is_local:
            start, files, _, _ = socket.recv_fds(self._end, LENGTH.size, 1)
            header[: len(start)] = start
            if not start:
                return None, files
            self._fill(memoryview(header)[len(start) :])
        elif not self._fill(memoryview(header), may_end=True):
            return None, files
        [length] = LENGTH.unpack(header)
        if length > MAX_MESSAGE_BYTES:
            raise PeerError(f"a message has {length} bytes, and {MAX_MESSAGE_BYTES} are allowed")
        text = bytearray(length)
        self._fill(memoryview(text))
        try:
            return self._decoder.decode(text), files
        except msgspec.MsgspecError as error:
            raise PeerError(f"a message is wrong: {error}") from error

    def receive_into(self, buffers: Buffers) -> None:
        for buffer in buffers:
            self._fill(buffer.data.cast("B"))

    def _fill(self, view: memoryview, may_end: bool = False) -> bool:
        """False: the other end was closed before the first byte."""
        offset = 0
        while offset < len(view):
            count = self._end.recv_into(view[offset:])
            if not count:
                if may_end and not offset:
                    return False
                raise ConnectionResetError("the connection ended inside a message")
            offset += count
        return True

    def finish(self) -> None:
        """Send nothing more: the other end will close the connection."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        """Threads that send and receive notice it."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only the thread that receives may: the number of the socket may be used again."""
        with self._sending:
            self._end.close()


def checksum(payload: Buffers) -> bytes:
    hash = xxhash.xxh3_128()
    for buffer in payload:
        hash.update(buffer.data)
    return hash.digest()


def connect(address: str) -> socket.socket:
    """Raises OSError."""
    if not address.startswith(UNIX):
        host, _, port = address.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT)
    end = socket.socket(socket.AF_UNIX)
    try:
        end.settimeout(CONNECT_TIMEOUT)
        end.connect(address.removeprefix(UNIX))
    except OSError:
        end.close()
        raise
    return end


def listen(address: str) -> socket.socket:
    """Raises OSError. A socket that an engine has left behind under this path is replaced."""
    if not address.startswith(UNIX):
        host, _, port = address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host.strip("[]"), int(port)), family=family)
    path = Path(address.removeprefix(UNIX))
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
