"""What a process works on, in memory that outlives it: after a crash, another process reads whose work it was."""

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

STEP, MESSAGE, GRAMMAR = range(3)  # kinds of work, which go on at the same time: each has a slot of its own
SLOT_BYTES = 2**24  # of address space; memory is taken where a slot is written
LENGTH = struct.Struct("<I")  # before the text of a slot: its bytes
FILE_BYTES = SLOT_BYTES * 3

RequestSample = tuple[str, int]  # a request's id, and which of its samples


class ActiveWork:
    """The samples of requests that a process works on now: it writes them, its parent reads them when it is dead."""

    def __init__(self, file: int) -> None:
        """`file`: of `shared_file`. It may be closed then."""
        self._memory = mmap.mmap(file, FILE_BYTES)
        self._written: dict[int, tuple[Sequence[RequestSample], int]] = {}  # by slot: samples, and bytes of their text

    def write(self, slot: int, samples: Sequence[RequestSample]) -> None:
        """The same object as the last time is not written again: it must not have changed."""
        written, num_bytes = self._written.get(slot, (None, 0))
        if written is not samples:
            text = "\0".join([f"{sample} {request_id}" for request_id, sample in samples]).encode()
            offset, num_bytes = slot * SLOT_BYTES + LENGTH.size, len(text)
            assert num_bytes <= SLOT_BYTES - LENGTH.size, f"{num_bytes} bytes of request ids"
            self.clear(slot)  # a crash from here on finds nothing, never half of the text
            self._memory[offset : offset + num_bytes] = text
            self._written[slot] = samples, num_bytes
        LENGTH.pack_into(self._memory, slot * SLOT_BYTES, num_bytes)

    def clear(self, slot: int) -> None:
        LENGTH.pack_into(self._memory, slot * SLOT_BYTES, 0)

    def read(self) -> set[RequestSample]:
        """All that is being worked on."""
        samples = set()
        for begin in range(0, FILE_BYTES, SLOT_BYTES):
            [length] = LENGTH.unpack_from(self._memory, begin)
            if length:
                text = self._memory[begin + LENGTH.size : begin + LENGTH.size + length].decode()
                samples |= {_sample(entry) for entry in text.split("\0")}
        return samples


def _sample(entry: str) -> RequestSample:
    sample, _, request_id = entry.partition(" ")
    return request_id, int(sample)


@contextmanager
def shared_file() -> Iterator[int]:
    """A file without a name for two `ActiveWork`s, in memory where the system has such files."""
    with (
        os.fdopen(os.memfd_create("active-work"), "w+b")
        if hasattr(os, "memfd_create")
        else tempfile.TemporaryFile() as file
    ):
        file.truncate(FILE_BYTES)
        yield file.fileno()
