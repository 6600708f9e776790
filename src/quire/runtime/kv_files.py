"""A KV block, or the state after one, as a file: what it is, where it lies, and how it is written and read.

    magic, length of the header, xxh3_128 of header and payload      32 bytes
    header: JSON, what the payload is                                up to byte 512, padded with zeros
    payload: the pages of the block, or the state                    the rest of the file

A reader knows the whole header beforehand, so that it compares instead of parsing. A file is written under another name
and renamed when it is whole. It is not synced: what a crash of the machine tears has another checksum."""

import errno
import json
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy import uint8
from numpy.typing import NDArray

from quire.core.block_keys import ABOUT_FILE, TENANT_BYTES, BlockKey, is_page, is_state

MAGIC = b"quirekv1"
HEADER_BYTES = 512
SUFFIX = ".kv"
PREFIX = struct.Struct("<8sQ16s")  # magic, length of the header, checksum
Buffers = Sequence[NDArray[uint8]]  # a block, in order


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What all blocks of one engine have in common. Blocks of another format are never read."""

    fingerprint: str  # hex, of the model and of everything that decides the bits of its KV cache
    dtype: str
    block_size: int  # tokens
    layout: str  # the backend whose pages these are
    nbytes: int  # of the payload
    state_nbytes: int = 0  # of a model with state slots: of the payload of a state
    page_nbytes: int = 0  # of a model with window pages: of the payload of one

    @property
    def num_states(self) -> int:
        """The number of states that a transferred prompt ends with."""
        return 1 if self.state_nbytes else 0

    def payload_bytes(self, key: BlockKey) -> int:
        if is_page(key):
            return self.page_nbytes
        return self.state_nbytes if is_state(key) else self.nbytes

    def header(self, key: BlockKey) -> bytes:
        fields = {
            "fingerprint": self.fingerprint,
            "kv_cache_dtype": self.dtype,
            "block_size": self.block_size,
            "layout": self.layout,
            "key": key.hex(),
            "bytes": self.payload_bytes(key),
        }
        return json.dumps(fields).encode()


def block_path(folder: str, key: BlockKey) -> str:
    """`folder` is that of a format. Each tenant has a folder in it, with 256 more inside."""
    path = key[TENANT_BYTES:].hex()
    return f"{folder}/{key[:TENANT_BYTES].hex()}/{path[:2]}/{path}{SUFFIX}"


def write_block(path: str, temporary: str, header: bytes, payload: Buffers) -> None:
    """Raises OSError. What is under `path` is whole, whenever this is interrupted."""
    file = _create(temporary)
    try:
        total = HEADER_BYTES + sum(buffer.nbytes for buffer in payload)
        written = os.writev(file, [_start(header, payload), *_views(payload)])
        if written != total:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {written} of {total} bytes were written")
        os.close(file)
        file = -1
        _rename(temporary, path)
    except OSError:
        if file >= 0:
            os.close(file)
        with suppress(OSError):
            os.unlink(temporary)  # noqa: PTH108 (paths are strings here: making a Path costs more than the call)
        raise


def _create(path: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o600)


def _rename(temporary: str, path: str) -> None:
    try:
        os.rename(temporary, path)  # noqa: PTH104
    except FileNotFoundError:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        os.rename(temporary, path)  # noqa: PTH104


def read_block(file: int, header: bytes, payload: Buffers) -> bool:
    """Read an open file into the buffers of a block. -> whether it is the block of this header, and whole. What the
    buffers hold otherwise is undefined."""
    total = HEADER_BYTES + sum(buffer.nbytes for buffer in payload)
    if os.fstat(file).st_size != total:
        return False
    start = bytearray(HEADER_BYTES)
    if os.preadv(file, [start, *_views(payload)], 0) != total:
        return False
    return start == _start(header, payload)


def _views(payload: Buffers) -> list[memoryview]:
    return [buffer.data for buffer in payload]


def _start(header: bytes, payload: Buffers) -> bytes:
    return (PREFIX.pack(MAGIC, len(header), _checksum(header, payload)) + header).ljust(HEADER_BYTES, b"\0")


def _checksum(header: bytes, payload: Buffers) -> bytes:
    hash = xxhash.xxh3_128(header)
    for view in _views(payload):
        hash.update(view)
    return hash.digest()


def write_about(folder: str, model: str, format: BlockFormat) -> None:
    """Say whose blocks a folder has. A read-only directory is no error: what is in it can be read."""
    about = {"model": model, "kv_cache_dtype": format.dtype, "block_size": format.block_size}
    path = Path(folder, ABOUT_FILE)
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(about))
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def describe(path: Path) -> dict[str, Any]:
    """The header of any block file, for people. Raises ValueError if it has none."""
    with path.open("rb") as file:
        start = file.read(HEADER_BYTES)
    if len(start) < HEADER_BYTES or not start.startswith(MAGIC):
        raise ValueError("it is no KV block")
    _, length, _ = PREFIX.unpack(start[: PREFIX.size])
    fields = json.loads(start[PREFIX.size : PREFIX.size + length])
    if not isinstance(fields, dict):
        raise ValueError("its header is no object")
    return fields


def is_whole(path: Path) -> bool:
    """Whether a block file has the length and the checksum that it says, and its name."""
    try:
        fields, content = describe(path), path.read_bytes()
        _, length, _ = PREFIX.unpack(content[: PREFIX.size])
        header, payload = content[PREFIX.size : PREFIX.size + length], np.frombuffer(content, uint8)[HEADER_BYTES:]
        is_named = str(path).endswith(block_path("", bytes.fromhex(fields["key"])))
        return is_named and fields["bytes"] == len(payload) and content[:HEADER_BYTES] == _start(header, [payload])
    except (OSError, ValueError, KeyError, TypeError):
        return False
