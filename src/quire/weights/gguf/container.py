"""The GGUF container: its header and metadata. tensors.py reads the tensors.

    magic "GGUF" · u32 version · u64 tensors · u64 keys · keys · tensor directory · padding · tensor data

No numpy here: the HTTP process reads its tokenizer with this. Every count and length is checked against the bytes that
are left before anything is allocated, so that a damaged file is an error with an offset, never a crash."""

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.compiled import native
from quire.weights.mapped_file import MappedFile

if TYPE_CHECKING:
    from mmap import mmap

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had 32-bit counts, and lasted weeks
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_NAME_BYTES = 65535  # of a key or a tensor's name
MAX_TEXT_BYTES = 1 << 26  # of a value
MAX_KEYS, MAX_TENSORS = 1 << 16, 1 << 18
MAX_ITEMS = 1 << 24  # of an array

# Number of a value's type -> its code in struct and array.array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
BOOL, STRING, ARRAY = 7, 8, 9

MIN_KEY_BYTES = 8 + 1 + 4 + 1  # name length, name, type, value
MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, name, dimensions, one dimension, type, offset


class FileBytes(Protocol):
    """A file, or its beginning."""

    @property
    def path(self) -> Path: ...

    @property
    def buffer(self) -> "bytes | mmap": ...

    @property
    def size(self) -> int: ...


class Cursor:
    """An offset in the file that moves forward. `what` names the key or tensor being read, for errors."""

    def __init__(self, file: FileBytes, offset: int) -> None:
        self.file = file
        self.offset = offset
        self.what = "the header"

    def bad(self, problem: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.file.path}: {self.what} at offset {self.offset} {problem}", "download the file again"
        )

    @property
    def left(self) -> int:
        return self.file.size - self.offset

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        if size > self.left:
            raise self.bad(f"needs {size} bytes, and {self.left} are left")
        value = struct.unpack_from("<" + code, self.file.buffer, self.offset)[0]
        self.offset += size
        return value

    def count(self, noun: str, item_bytes: int, most: int | None = None) -> int:
        """A 64-bit count of items that take at least `item_bytes` each."""
        count: int = self.scalar("Q")
        if most is not None and count > most:
            raise self.bad(f"has {count} {noun}, and at most {most} are possible")
        if count * item_bytes > self.left:
            raise self.bad(f"has {count} {noun}, and {self.left} bytes are left")
        return count

    def string(self, max_bytes: int = MAX_TEXT_BYTES) -> str:
        start = self.offset
        length = self.count("bytes of text", 1, max_bytes)
        data = self.file.buffer[self.offset : self.offset + length]
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            self.offset = start
            raise self.bad(f"is not UTF-8: {error.reason}") from error
        self.offset += length
        return text

    def skip_strings(self, count: int) -> None:
        """Skip an array of strings, checking that each ends inside the file."""
        try:
            self.offset = native.skip_strings(self.file.buffer, self.offset, count)
        except IndexError as error:
            raise self._bad_string() from error

    def strings(self, count: int) -> list[str]:
        """An array of strings. There may be hundreds of thousands."""
        strings: list[str]
        try:
            strings, self.offset = native.read_strings(self.file.buffer, self.offset, count)
        except IndexError as error:
            raise self._bad_string() from error
        except UnicodeDecodeError as error:
            raise self.bad(f"holds a string that is not UTF-8: {error.reason}") from error
        return strings

    def _bad_string(self) -> BadCheckpoint:
        return self.bad("holds a string that ends after the file does")


@dataclass(frozen=True, slots=True)
class SkippedStrings:
    """An array of strings that was not read."""

    count: int


class GGUFFile:
    """`metadata`: GGUF key -> number, boolean, string, `array.array` or list of strings.

    Lists of strings are vocabularies and take most of the time: without `with_strings` they are `SkippedStrings`."""

    def __init__(self, path: Path, *, with_strings: bool = False) -> None:
        self.path = path
        self.file = MappedFile(path)
        if self.file.buffer[:4] != MAGIC:
            raise BadCheckpoint(f"{path} is not a GGUF file: it begins with {self.file.buffer[:4]!r}")
        cursor = Cursor(self.file, 4)
        self.version: int = cursor.scalar("I")
        if self.version not in VERSIONS:
            if int.from_bytes(self.file.buffer[4:8], "big") in VERSIONS:
                raise BadCheckpoint(f"{path} is a big-endian GGUF file", "get the little-endian one")
            raise Unsupported(f"{path} is GGUF version {self.version}", "versions 2 and 3 are read")
        self.num_tensors = cursor.count("tensors", MIN_TENSOR_BYTES, MAX_TENSORS)
        num_keys = cursor.count("keys", MIN_KEY_BYTES, MAX_KEYS)
        self.metadata: dict[str, Any] = {}
        for index in range(num_keys):
            read_key(cursor, index, self.metadata, with_strings)
        self.directory_offset = cursor.offset  # of the tensor directory
        self.alignment = self._alignment()

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 0 < value <= MAX_ALIGNMENT or value & (value - 1):
            raise BadCheckpoint(
                f"{self.path}: general.alignment is {value!r}, not a power of two up to {MAX_ALIGNMENT}"
            )
        return value


def first_keys(file: str, data: bytes) -> dict[str, Any]:
    """The keys that lie whole within the first bytes of a file; none where it is no GGUF file."""
    metadata: dict[str, Any] = {}
    cursor = Cursor(FirstBytes(Path(file), data), 24)
    if data[:4] != MAGIC or len(data) < cursor.offset:
        return metadata
    for index in range(min(int.from_bytes(data[16:24], "little"), MAX_KEYS)):
        try:
            read_key(cursor, index, metadata, with_strings=False)
        except BadCheckpoint:  # the bytes end here
            break
    return metadata


@dataclass(frozen=True, slots=True)
class FirstBytes:
    path: Path
    buffer: bytes

    @property
    def size(self) -> int:
        return len(self.buffer)


def read_key(cursor: Cursor, index: int, metadata: dict[str, Any], with_strings: bool) -> None:
    """Read the next key and its value into `metadata`."""
    cursor.what = f"key {index}"
    key = cursor.string(MAX_NAME_BYTES)
    cursor.what = f"key {key!r}"
    if key in metadata:
        raise cursor.bad("was given before")
    metadata[key] = _value(cursor, cursor.scalar("I"), with_strings)


def _value(cursor: Cursor, kind: int, with_strings: bool) -> Any:
    if kind in SCALARS:
        return cursor.scalar(SCALARS[kind])
    if kind == BOOL:
        return _bool(cursor)
    if kind == STRING:
        return cursor.string()
    if kind == ARRAY:
        return _array(cursor, cursor.scalar("I"), with_strings)
    raise cursor.bad(f"has a value of type {kind}, and the types are 0 to 12")


def _array(cursor: Cursor, kind: int, with_strings: bool) -> Any:
    if kind == STRING:
        count = cursor.count("strings", 8, MAX_ITEMS)
        if with_strings:
            return cursor.strings(count)
        cursor.skip_strings(count)
        return SkippedStrings(count)
    if kind == ARRAY:
        raise cursor.bad("is an array of arrays, which no writer makes")
    code = "B" if kind == BOOL else SCALARS.get(kind)
    if code is None:
        raise cursor.bad(f"is an array of type {kind}, and the types are 0 to 12")
    values = array(code)
    size = cursor.count("items", values.itemsize, MAX_ITEMS) * values.itemsize
    values.frombytes(cursor.file.buffer[cursor.offset : cursor.offset + size])
    cursor.offset += size
    return values


def _bool(cursor: Cursor) -> bool:
    value = cursor.scalar("B")
    if value > 1:
        raise cursor.bad(f"is a boolean of value {value}")
    return bool(value)
