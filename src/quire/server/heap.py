"""The C library's heap: threads share one, and what requests have freed is given back to the system now and then."""

import ctypes
import sys

TRIM_SECONDS = 60.0
M_ARENA_MAX = -8  # of glibc's mallopt


def share() -> None:
    """Before threads start: glibc would give each a heap of its own, with holes of its own. They wait for each other
    anyway, as they run Python."""
    if (libc := _glibc()) is not None:
        libc.mallopt(M_ARENA_MAX, 1)


def trim() -> None:
    """glibc keeps holes between what lives longer: after a crowd of requests, more than the server needs itself."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "malloc_trim") else None
