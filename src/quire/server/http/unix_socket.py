"""The unix socket that a server listens on: for its own user alone, and gone when the server is."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

MODE = 0o600


class BoundFile:
    """The file of a bound unix socket."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._made = self._path.stat()

    def remove(self) -> None:
        """Remove it, unless another server has replaced it."""
        with suppress(OSError):
            if os.path.samestat(self._path.stat(), self._made):
                self._path.unlink()


def bind_unix(path: str) -> socket.socket:
    """A bound socket. One that a dead server has left is replaced. Raises OSError, also where a server listens."""
    _remove_stale(Path(path))
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o777 & ~MODE)  # from the first moment on
    try:
        bound.bind(path)
    except BaseException:
        bound.close()
        raise
    finally:
        os.umask(mask)
    return bound


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError(None, "this file is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise FileExistsError(None, "another server listens on it")
