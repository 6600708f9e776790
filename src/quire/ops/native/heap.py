"""The C library's heap while large arrays come and go."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGE_ARRAY_BYTES, USUAL_ARRAY_BYTES = 1 << 20, 32 << 20  # the latter is what glibc comes to by itself
USUAL_FREE_BYTES = 128 << 10  # at the end of a heap; more is returned to the system


def free_at_once(num_bytes: int) -> None:
    """Let the C library return arrays of this size to the system when they are freed, and what it has kept so far.

    Those that come and go would otherwise leave holes between those that stay."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.mallopt(M_MMAP_THRESHOLD, num_bytes)
        libc.malloc_trim(0)


@contextmanager
def large_arrays_freed_at_once() -> Iterator[None]:
    free_at_once(LARGE_ARRAY_BYTES)
    try:
        yield
    finally:
        free_at_once(USUAL_ARRAY_BYTES)


@contextmanager
def large_arrays_reused() -> Iterator[None]:
    """Let the C library keep what is freed for the arrays that follow: the system's memory costs a fault for each
    page."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        yield
        return
    libc.mallopt(M_MMAP_THRESHOLD, USUAL_ARRAY_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * USUAL_ARRAY_BYTES)
    try:
        yield
    finally:
        libc.mallopt(M_TRIM_THRESHOLD, USUAL_FREE_BYTES)
        libc.malloc_trim(0)
