"""An output that appears only when it is whole: files in OUT.partial, whose layout is known before a byte is computed.

Every file begins with a header that says where each tensor lies, so tensors are written in any order, and a piece at a
time. A journal lists the tensors that are done, with the checksums of their bytes: a run that was killed goes on where
it stopped, if it is asked for the same output again."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from quire.core.errors import DoesNotFit, QuireError
from quire.quantize.writeback import Writeback

JOURNAL = "journal.jsonl"
SPARE_BYTES = 16 << 20  # left free on the disk
CHUNK_BYTES = 8 << 20  # written at once: the system lets one thread at a time write to a file
WRITEBACK_BYTES = 1 << 20  # less is left to fsync


class OutputError(QuireError):
    """The output cannot be written there."""

    status, code = 400, "output"


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the output: its type is a name of GGUF's or of safetensors'."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file: its first bytes, and offset and size of each tensor."""

    name: str
    header: bytes
    places: Mapping[str, tuple[int, int]]
    size: int


Pieces = Callable[[], Iterator[tuple[str, int, Any]]]  # (tensor, offset in it, bytes), in order


class PartialOutput:
    """`out`: a file (the first of its splits), or a folder where `small` (name -> bytes of further files) is given."""

    def __init__(self, out: Path, files: Sequence[FileLayout], small: Mapping[str, bytes] | None = None) -> None:
        self.out, self._files, self._small = out, files, small
        self.folder = out.with_name(out.name + ".partial")
        self._places = {name: (file.name, *place) for file in files for name, place in file.places.items()}
        self._checksums: dict[str, int] = {}
        self._open: dict[str, FileIO] = {}
        self._journal: FileIO | None = None
        self._lock = threading.Lock()  # of the journal: tensors may be written by several threads
        self._writeback = Writeback()

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self._files)

    @property
    def num_done(self) -> int:
        """Tensors in the journal."""
        return len(self._checksums)

    def begin(self, settings: Mapping[str, Any]) -> set[str]:
        """Make or resume the partial output; -> the tensors that it has. `settings` are all that the bytes of a tensor
        depend on, besides the headers."""
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for file in self._files:
            digest.update(file.header)
        first = {"output": digest.hexdigest()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._journal = journal = (self.folder / JOURNAL).open("a+b", buffering=0)
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{self.folder} is being written by another process", "wait for it, or name another output"
            ) from error
        except OSError as error:
            raise OutputError(
                f"{self.folder} cannot be written: {error.strerror}", "name an output in a folder of yours"
            ) from error
        journal.seek(0)
        lines = journal.read().splitlines()
        done = self._done(lines) if lines and lines[0] == json.dumps(first).encode() else set()
        if not done:
            journal.truncate(0)
            self._start_over(first)
        self._check_space()
        for file in self._files:
            path = self.folder / file.name
            with _errors_named(path):
                self._open[file.name] = stream = path.open("r+b" if done else "w+b", buffering=0)
                if not done:
                    _write_at(stream.fileno(), memoryview(file.header), 0)
                    stream.truncate(file.size)
        return done

    def _done(self, lines: Sequence[bytes]) -> set[str]:
        """The tensors of the journal whose bytes are in the files."""
        done = set()
        for line in lines[1:]:
            try:
                entry = json.loads(line)
            except ValueError:  # the last line of a process that was killed
                continue
            if all(name in self._places and self._checksum(name) == checksum for name, checksum in entry.items()):
                done |= entry.keys()
                self._checksums |= entry
        return done

    def _checksum(self, name: str) -> int | None:
        file, offset, size = self._places[name]
        checksum = 0
        try:
            with (self.folder / file).open("rb") as stream:
                stream.seek(offset)
                while size > 0 and (data := stream.read(min(size, 1 << 24))):
                    checksum, size = zlib.crc32(data, checksum), size - len(data)
        except OSError:
            return None
        return None if size else checksum

    def _start_over(self, first: Mapping[str, str]) -> None:
        for file in self._files:
            (self.folder / file.name).unlink(missing_ok=True)
        self._append(first)

    def _check_space(self) -> None:
        used = sum(path.stat().st_blocks * 512 for path in self.folder.iterdir())
        needed = self.nbytes + SPARE_BYTES - used
        if (free := shutil.disk_usage(self.folder).free) < needed:
            self.close()
            shutil.rmtree(self.folder)
            raise DoesNotFit(
                f"{self.out} needs {needed / 1e9:.2f} GB on the disk, and {free / 1e9:.2f} GB are free",
                "free some, or name an output on another disk",
            )

    def write(self, pieces: Pieces) -> None:
        """Write tensors whole; the journal then has them."""
        checksums: dict[str, int] = {}
        written: dict[str, int] = {}
        for name, first, data in pieces():
            view = memoryview(data).cast("B")
            file, offset, size = self._places[name]
            assert first == written.get(name, 0) and first + len(view) <= size, f"{name}: bytes {first} of {size}"
            checksum = checksums.get(name, 0)
            with _errors_named(self.folder / file):
                for cut in range(0, len(view), CHUNK_BYTES):
                    chunk = view[cut : cut + CHUNK_BYTES]
                    checksum = zlib.crc32(chunk, checksum)
                    self._write_chunk(self._open[file].fileno(), chunk, offset + first + cut)
            checksums[name] = checksum
            written[name] = first + len(view)
        short = {name for name, size in written.items() if size != self._places[name][2]}
        assert not short, f"{short} are not whole"
        with self._lock:
            self._append(checksums)
            self._checksums |= checksums

    def _write_chunk(self, file: int, chunk: memoryview, offset: int) -> None:
        _write_at(file, chunk, offset)
        if len(chunk) >= WRITEBACK_BYTES:
            self._writeback.begin(file, offset, len(chunk))

    def _append(self, entry: Mapping[str, Any]) -> None:
        assert self._journal is not None
        with _errors_named(self.folder / JOURNAL):
            line = json.dumps(entry).encode() + b"\n"
            if self._journal.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self) -> None:
        """The output takes its name."""
        missing = self._places.keys() - self._checksums.keys()
        assert not missing, f"{len(missing)} tensors are not written: {sorted(missing)[:3]}"
        self._writeback.close()  # the rest is fsync's
        with _errors_named(self.folder):
            for stream in self._open.values():
                os.fsync(stream.fileno())
            for name, data in (self._small or {}).items():
                (self.folder / name).write_bytes(data)
        if self._small is None:
            for file in reversed(self._files):  # the first split last: without it, the others are no model
                (self.folder / file.name).replace(self.out.with_name(file.name))
            self.close()
            shutil.rmtree(self.folder)
            return
        if self.out.exists():
            self.out.rmdir()  # checked to be empty
        (self.folder / JOURNAL).unlink()
        self.close()
        self.folder.replace(self.out)

    def discard(self) -> None:
        self.close()
        shutil.rmtree(self.folder)

    def close(self) -> None:
        """What is done stays in the partial output, for another run."""
        self._writeback.close()
        for stream in (*self._open.values(), *([self._journal] if self._journal else [])):
            stream.close()


@contextmanager
def _errors_named(path: Path) -> Iterator[None]:
    """Raise an error of the file system as a sentence with a hint."""
    try:
        yield
    except OSError as error:
        hint = "free some space, and run it again: what is done is kept"
        raise OutputError(f"{path} cannot be written: {error.strerror}", hint) from error


def _write_at(file: int, view: memoryview, offset: int) -> None:
    while len(view):
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count


def check_free(out: Path, source: Path) -> None:
    """Raises where the output is there already."""
    if out.is_dir() and not any(out.iterdir()) and not out.samefile(Path.cwd()):
        return
    if out.exists():
        own = source.exists() and out.samefile(source)
        hint = "name another; the model itself is never overwritten" if own else "remove it first, or name another"
        raise OutputError(f"{out} exists already", hint)
