"""What stays when the gateway ends: keys that were made while it ran, and what every key has spent.

Several gateways that share limits in Redis may share the folder, too: each change of the keys is made under a lock, and
seen by the others within a second. What is spent is in Redis then."""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from quire.core.errors import BadRequest, QuireError
from quire.gateway.config import GatewayKey

T = TypeVar("T")
Spent = dict[str, tuple[str, int]]  # by name of the key: the period, and billionths


class StateLost(QuireError):
    """A change cannot be written down, and so is not made."""

    status, code = 503, "state_not_written"


class _KeysFile(msgspec.Struct):
    keys: list[GatewayKey]


class StateFolder:
    """Raises BadRequest for a folder that cannot be used."""

    def __init__(self, path: str, is_shared: bool) -> None:
        self._folder, self.is_shared = Path(path), is_shared
        self._writing = threading.Lock()
        self._keys_file, self._spent_file = self._folder / "keys.json", self._folder / "spent.json"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock: IO[bytes] = (self._folder / "lock").open("ab")
        except OSError as error:
            raise BadRequest(f"cannot write to {path}: {error.strerror}", param="state_dir") from None
        try:
            if not is_shared:
                self._lock_for_good()
            self._stamp = self._changed_at()
            self.keys = self._read_keys()
            self._told: Spent = self.read_spent()
        except QuireError:
            self.close()
            raise

    def change(self, edit: Callable[[list[GatewayKey]], list[GatewayKey]]) -> None:
        """Another list of keys, which is on the disk when this returns. Raises StateLost, and changes nothing."""
        with self._locked():
            keys = edit(self._read_keys())
            self._write(self._keys_file, _KeysFile(keys))
            self._stamp, self.keys = self._changed_at(), keys

    def read_changed(self) -> bool:
        """Read the keys again if another gateway has changed them. -> whether it has"""
        if not self.is_shared or (stamp := self._changed_at()) == self._stamp:
            return False
        self._stamp, self.keys = stamp, self._read_keys()
        return True

    def read_spent(self) -> Spent:
        return {} if self.is_shared else self._read(self._spent_file, Spent) or {}

    def write_spent(self, spent: Spent) -> None:
        """May be called by a thread. Raises StateLost."""
        with self._writing:
            if spent != self._told and not self.is_shared and not self._lock.closed:
                self._write(self._spent_file, spent)
                self._told = spent

    def close(self) -> None:
        self._lock.close()

    def _lock_for_good(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            message = f"another gateway uses the state_dir {self._folder}"
            raise BadRequest(message, "several gateways share it with [redis] only", param="state_dir") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self.is_shared:
            yield
            return
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _changed_at(self) -> tuple[int, int]:
        try:
            status = self._keys_file.stat()
        except OSError:
            return 0, 0
        return status.st_mtime_ns, status.st_ino

    def _read_keys(self) -> list[GatewayKey]:
        read = self._read(self._keys_file, _KeysFile)
        return read.keys if read is not None else []

    def _read(self, file: Path, kind: type[T]) -> T | None:
        try:
            return msgspec.json.decode(file.read_bytes(), type=kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise BadRequest(f"cannot read {file}: {error}", "mend it or move it away", param="state_dir") from None

    def _write(self, file: Path, value: object) -> None:
        """Whole, or not at all."""
        new = file.with_suffix(".new")
        try:
            new.touch(mode=0o600)
            with new.open("wb") as out:
                out.write(msgspec.json.format(msgspec.json.encode(value), indent=1))
                out.flush()
                os.fsync(out.fileno())
            new.replace(file)
        except OSError as error:
            raise StateLost(f"cannot write {file}: {error.strerror}", "nothing was changed") from None
