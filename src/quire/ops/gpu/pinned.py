"""Pinned memory of the host: the GPU reads and writes it directly."""

import logging
import mmap
import time
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from quire.core.errors import DoesNotFit

log = logging.getLogger("quire.gpu")

LOGGED_BYTES = 2**30
PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister: for all contexts, with an address on the device


def pinned(num_bytes: int, owner: object, option: str = "swap_space") -> Tensor:
    """uint8 [num_bytes], not cleared: locked and mapped for the device until `owner` is collected. `option`: which one
    asks for it.

    torch's own pinned allocator rounds sizes up to a power of two: a request of 20 GiB would take 32."""
    begin, size = time.perf_counter(), f"{num_bytes / 2**30:.2f} GiB"
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DoesNotFit(f"{size} of memory cannot be had for {option}: {error}", "ask for less") from error
    with suppress(AttributeError, OSError):  # an operating system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    pages = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    failure = int(cudart.cudaHostRegister(pages.data_ptr(), num_bytes, PORTABLE_AND_MAPPED))
    if failure:
        raise DoesNotFit(
            f"{size} of memory could not be pinned for {option} (CUDA error {failure})",
            "ask for less, or raise the limit on locked memory (`ulimit -l`)",
        )
    weakref.finalize(owner, _unpin, pages).atexit = False  # the finalizer holds the memory
    level = logging.INFO if num_bytes >= LOGGED_BYTES else logging.DEBUG
    log.log(level, "pinned %s of memory for %s in %.1f s", size, option, time.perf_counter() - begin)
    return pages


def _unpin(pages: Tensor) -> None:
    torch.cuda.synchronize()  # a copy may be in flight
    torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())
