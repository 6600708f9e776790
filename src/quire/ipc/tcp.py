"""A connection between two machines whose ends know each other by a token."""

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket

TOKEN_BYTES = 32
TOKEN_TIMEOUT = 5.0  # seconds that a client has to send it
# Seconds until an end whose machine is gone is noticed: silent for so long, then so many questions so far apart.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}

log = logging.getLogger("quire.engine")


def connect(host: str, port: int, token: bytes, timeout: float) -> socket.socket:
    end = socket.create_connection((host, port), timeout)
    try:
        end.sendall(token)
        _set_up(end)
    except BaseException:
        end.close()
        raise
    return end


class TokenListener:
    """Takes one connection, of the client that knows the token. A context manager."""

    def __init__(self, host: str) -> None:
        """`host`: the address to listen on. The port is any that is free."""
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setblocking(False)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self.token = secrets.token_bytes(TOKEN_BYTES)

    def __enter__(self) -> "TokenListener":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    async def accept(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        while True:
            end, address = await loop.sock_accept(self._socket)
            end.setblocking(False)
            try:
                given = await asyncio.wait_for(_receive(end), TOKEN_TIMEOUT)
            except (OSError, TimeoutError):
                given = b""
            except BaseException:
                end.close()
                raise
            if hmac.compare_digest(given, self.token):
                _set_up(end)
                return end
            log.warning("a connection from %s without the token of the engine is refused", address[0])
            end.close()


async def _receive(end: socket.socket) -> bytes:
    """The first TOKEN_BYTES bytes, or fewer where there are no more."""
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < TOKEN_BYTES and (data := await loop.sock_recv(end, TOKEN_BYTES - len(received))):
        received += data
    return received


def _set_up(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        with contextlib.suppress(AttributeError, OSError):  # not every system has them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
