"""The socket that clients connect to."""

import socket
import sys

from quire.core.errors import QuireError

BACKLOG = 2048  # connections that may wait to be accepted


class CannotListen(QuireError):
    code = "cannot_listen"


def bind(host: str, port: int) -> socket.socket:
    """A socket that says it is TCP. Only then does asyncio send a small write, such as a token, at once, and not up to
    40 ms later."""
    bound = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = min(
            addresses, key=lambda one: one[0] != socket.AF_INET
        )  # 127.0.0.1 for localhost
        bound = socket.socket(family, kind, socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        return bound
    except OSError as error:
        if bound is not None:
            bound.close()
        raise _cannot_listen(host, port, error) from error


def listen(bound: socket.socket) -> socket.socket:
    """Let clients connect. Raises CannotListen if another process took the port meanwhile."""
    try:
        bound.listen(BACKLOG)
        return bound
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    why = error.strerror or error
    return CannotListen(f"cannot listen on {host}:{port}: {why}", "choose another `--host` or `--port`")


def allow_open_files() -> None:
    """Raise the limit of open files as far as allowed: a connection takes one, and 1024 is the usual default."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
