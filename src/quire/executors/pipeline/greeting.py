"""How an engine and stages on other machines greet each other: typed messages of a bounded size, versions first.

The engine opens a connection to each stage, in order, and says what it is to compute. A stage then opens one to the
stage before it, and the engine one to the last of them: hidden states come back on these."""

import contextlib
import socket
import struct
import time
from pathlib import Path
from typing import Any

import msgspec

from quire import __version__
from quire.core.errors import BadRequest, EngineFailed
from quire.runtime.model_fingerprint import fingerprint

LENGTH = struct.Struct("<I")  # as in ipc/channel.py
VERSION = 1
MAX_GREETING_BYTES = 4096
GREETING_TIMEOUT = 5.0  # seconds
CONNECT_TIMEOUT = 10.0  # seconds in which a stage may be started again
RETRY_INTERVAL = 0.1
ENDS_AFTER = 4000  # milliseconds without a sign of the other machine


class GreetStage(msgspec.Struct, tag=True):
    """The engine's first message to a stage. Both ends must be alike in the first three."""

    version: int
    quire: str
    fingerprint: str  # of the model's files
    session: str  # names this start of the engine
    rank: int  # of the stage, from 1 on
    size: int  # stages
    before: str = ""  # the address of the stage before; "": this is the first


class FetchHidden(msgspec.Struct, tag=True):
    """Send the hidden states of this session here."""

    version: int
    session: str


class StageWelcome(msgspec.Struct, tag=True):
    pass


class StageRefused(msgspec.Struct, tag=True):
    reason: str
    hint: str = ""


Greeting = GreetStage | FetchHidden
_encode = msgspec.msgpack.Encoder().encode
_GREETING = msgspec.msgpack.Decoder[Any](Greeting)
_ANSWER = msgspec.msgpack.Decoder[Any](StageWelcome | StageRefused)


def files_digest(path: Path) -> str:
    """Of a model's files: equal where copies of them are on several machines."""
    return fingerprint(path, "stages", with_times=False)


def new_greeting(fingerprint: str, session: str, rank: int, size: int, before: str) -> GreetStage:
    return GreetStage(VERSION, __version__, fingerprint, session, rank, size, before)


def refusal(greeting: GreetStage, fingerprint: str) -> StageRefused | None:
    """Why an engine is not served."""
    if (greeting.version, greeting.quire) != (VERSION, __version__):
        return StageRefused(
            f"the stage is quire {__version__}, and the engine is {greeting.quire}", "install the same on all machines"
        )
    if greeting.fingerprint != fingerprint:
        return StageRefused("the stage has other model files than the engine", "give the same files to all machines")
    if not 1 <= greeting.rank < greeting.size:
        return StageRefused(f"stage {greeting.rank} of {greeting.size} is asked for")
    return None


def send(end: socket.socket, message: Greeting | StageWelcome | StageRefused) -> None:
    text = _encode(message)
    end.sendall(LENGTH.pack(len(text)) + text)


def receive_greeting(end: socket.socket) -> Greeting | None:
    """None: it is none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
        greeting: Greeting = _GREETING.decode(_frame(end))
        return greeting
    return None


def _frame(end: socket.socket) -> bytes:
    """A message, and no byte that follows it."""
    [length] = LENGTH.unpack(_exactly(end, LENGTH.size))
    if length > MAX_GREETING_BYTES:
        raise ValueError(f"a greeting of {length} bytes")
    return _exactly(end, length)


def _exactly(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := end.recv(count - len(data))):
            raise ConnectionResetError("the connection ended in a greeting")
        data += part
    return data


def parse_address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise BadRequest(f"`{address}` is no address of a stage", "write HOST:PORT", param="pipeline_stages")
    return host.strip("[]"), int(port)


def connect(address: str, greeting: Greeting, timeout: float | None = None) -> socket.socket:
    """A connection to a stage that has welcomed us. Raises EngineFailed. A stage may be started again meanwhile."""
    end_time = time.monotonic() + (CONNECT_TIMEOUT if timeout is None else timeout)
    while True:
        try:
            end = socket.create_connection(parse_address(address), GREETING_TIMEOUT)
            break
        except OSError as error:
            if time.monotonic() > end_time:
                raise EngineFailed(
                    f"no stage answers at {address}: {error}", f"start `quire stage MODEL --listen {address}` there"
                ) from error
            time.sleep(RETRY_INTERVAL)
    try:
        set_tcp_options(end)
        send(end, greeting)
        answer = _ANSWER.decode(_frame(end))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        end.close()
        raise EngineFailed(f"the stage at {address} does not answer as one: {error}") from error
    if isinstance(answer, StageRefused):
        end.close()
        raise EngineFailed(f"{address}: {answer.reason}", answer.hint)
    return end


def set_tcp_options(end: socket.socket) -> None:
    """Small messages leave at once, and a machine that is gone is noticed."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, ENDS_AFTER)
