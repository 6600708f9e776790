"""The C library's heap: what requests have freed is given back to the system now and then."""

import ctypes
import sys

TRIM_SECONDS = 60.0


def trim() -> None:
    """glibc keeps holes between what lives longer: after a crowd of requests, more than the server needs itself."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
