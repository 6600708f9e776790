"""Memory of the host that the GPU reaches by itself."""

import logging
import mmap
import time
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from quire.core.errors import DoesNotFit

log = logging.getLogger("quire.gpu")

PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister: for all contexts, and with an address on the device


def pinned(num_bytes: int, owner: object) -> Tensor:
    """uint8 [num_bytes], not cleared: locked and mapped for the device until the owner is gone.

    torch's own pinned allocator rounds every size up to a power of two: of 20 GiB asked for, 12 would lie idle."""
    begin, size = time.perf_counter(), f"{num_bytes / 2**30:.2f} GiB"
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DoesNotFit(f"{size} of memory cannot be had for swapping: {error}", "ask for less swap_space") from error
    with suppress(AttributeError, OSError):  # a kernel that knows none
        memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    pages = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    failure = int(cudart.cudaHostRegister(pages.data_ptr(), num_bytes, PORTABLE_AND_MAPPED))
    if failure:
        raise DoesNotFit(
            f"{size} of memory could not be pinned for swapping (CUDA error {failure})",
            "ask for less swap_space, or raise the limit on locked memory (`ulimit -l`)",
        )
    weakref.finalize(owner, _unpin, pages).atexit = False  # it holds the memory until then
    log.info("pinned %s of memory for swapping in %.1f s", size, time.perf_counter() - begin)
    return pages


def _unpin(pages: Tensor) -> None:
    torch.cuda.synchronize()  # a copy may be under way
    torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())
