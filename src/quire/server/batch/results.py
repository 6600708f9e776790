"""The output file of a batch. It is only appended to, so that an interrupted batch can be resumed."""

import fcntl
import os
import time
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

import msgspec
from msgspec import Struct

from quire.server.batch.requests import BadBatch, RequestKey

SYNC_LINES = 64  # results that may be lost if the machine fails; none are if the program does
SYNC_SECONDS = 5.0


class BatchReply(Struct):
    """The HTTP response that the request would have had."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(Struct):
    code: str
    message: str


class BatchResult(Struct, kw_only=True):
    """Either `response` or `error` is null."""

    id: str
    custom_id: str
    response: BatchReply | None = None
    error: BatchError | None = None


class _Done(Struct):
    custom_id: str
    id: str = ""


def result_id(repeat: int) -> str:
    """The id of a result tells which of several lines with the same custom_id it is for."""
    return f"batch_req_{uuid4().hex}" + (f"-{repeat}" if repeat else "")


def repeat_of(name: str) -> int:
    repeat = name.rpartition("-")[2] if "-" in name else ""
    return int(repeat) if repeat.isascii() and repeat.isdigit() and len(repeat) < 10 else 0


_decoder = msgspec.json.Decoder(_Done)
_encode = msgspec.json.Encoder().encode


class BatchResults:
    """A context manager. `done`: the requests whose results were in the file when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.done: set[RequestKey] = set()

    def __enter__(self) -> "BatchResults":
        try:
            self._file: BinaryIO = self._path.open("a+b", buffering=0)  # nothing is left to write when it is closed
        except OSError as error:
            raise BadBatch(f"{self._path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._file.truncate(self._read())
        except BaseException:
            self._file.close()
            raise
        self._unsynced, self._synced = 0, time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:  # otherwise there is an error to report, and perhaps the same one
                self._sync()
        finally:
            self._file.close()

    def add(self, result: BatchResult) -> None:
        line = memoryview(_encode(result) + b"\n")
        try:
            while line:  # a disk may have room for a part of it
                line = line[self._file.write(line) :]  # survives this program being killed
        except OSError as error:
            raise self._cannot_write(error) from error
        self._unsynced += 1
        if self._unsynced >= SYNC_LINES or time.monotonic() > self._synced + SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        """Survives a machine that fails."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._cannot_write(error) from error
        self._unsynced, self._synced = 0, time.monotonic()

    def _cannot_write(self, error: OSError) -> BadBatch:
        hint = "make room, then run the same command again: it goes on with what is left"
        return BadBatch(f"{self._path} cannot be written: {error.strerror}", hint)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise BadBatch(f"another run is writing to {self._path}", "wait for it, or choose another file") from error

    def _read(self) -> int:
        """Collect `done` -> the length of the file without a torn last line."""
        end = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                if line.strip():
                    self.done.add(self._key(number, line))
                end += len(line)
        return end

    def _key(self, number: int, line: bytes) -> RequestKey:
        try:
            done = _decoder.decode(line)
            return done.custom_id, repeat_of(done.id)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadBatch(
                f"{self._path}, line {number} is no result of a batch: {error}",
                "results are appended to this file: choose another, or remove it",
            ) from error
