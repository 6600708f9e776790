"""A file that is mapped, and read from the disk before it is looked at."""

import ctypes
import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from quire.weights import mapped_file
from quire.weights.mapped_file import MappedFile, chained


def test_what_is_read_ahead_is_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are asked for once: up to the end of the file, and on from the beginning of the next."""
    monkeypatch.setattr(mapped_file, "CHUNK_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(mapped_file, "READAHEAD_BYTES", 2 * mmap.PAGESIZE)
    data = np.random.default_rng(0).integers(0, 256, 7 * mmap.PAGESIZE + 100, dtype=np.uint8)
    for name in ("first", "second", "third"):
        (tmp_path / name).write_bytes(data.tobytes())
    first, second, third = [MappedFile(tmp_path / name) for name in ("first", "second", "third")]
    assert chained([first, first, second, third, second]) == [first, second, third]
    for offset in (3 * mmap.PAGESIZE + 5, 0, 7 * mmap.PAGESIZE, 6 * mmap.PAGESIZE):
        np.testing.assert_array_equal(first.rows(offset, 1, 90)[0], data[offset : offset + 90])
        first.drop_pages()
    assert [sorted(file._requested) for file in (first, second, third)] == [list(range(8)), [0, 1], []]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux is asked which pages are there")
def test_what_follows_comes_without_being_looked_at(tmp_path: Path) -> None:
    """All of a small file and of the next one, when the first byte is asked for."""
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(bytes(3 * mapped_file.CHUNK_BYTES + 100))
        with (tmp_path / name).open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    files = chained(MappedFile(tmp_path / name) for name in ("first", "second"))
    files[0].rows(0, 1, 1)
    until = time.monotonic() + 30
    while missing := {file.path.name: count for file in files if (count := num_missing(file.path))}:
        assert time.monotonic() < until, missing
        time.sleep(0.01)


def num_missing(path: Path) -> int:
    """Pages that are not in memory."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        there = (ctypes.c_ubyte * (-(-len(mapped) // mmap.PAGESIZE)))()
        begin = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(len(mapped)), there
        )
        del begin
        assert not failed
        return sum(not page & 1 for page in there)
