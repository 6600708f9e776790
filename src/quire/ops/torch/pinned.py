"""Memory of the host that the GPU reaches by itself."""

import logging
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from quire.core.errors import DoesNotFit

log = logging.getLogger("quire.gpu")

PORTABLE_AND_MAPPED = 1 | 2  # flags of cudaHostRegister: for all contexts, and with an address on the device


def pin(tensors: Sequence[Tensor], owner: object) -> None:
    """Lock the tensors' memory and map it for the device until the owner is gone.

    torch's own pinned allocator rounds every size up to a power of two: of 20 GiB asked for, 12 would lie idle."""
    cudart, begin = torch.cuda.cudart(), time.perf_counter()
    size = f"{sum(tensor.nbytes for tensor in tensors) / 2**30:.2f} GiB"
    for tensor in tensors:
        failure = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, PORTABLE_AND_MAPPED))
        if failure:
            raise DoesNotFit(
                f"{size} of memory could not be pinned for swapping (CUDA error {failure})",
                "ask for less swap_space, or raise the limit on locked memory (`ulimit -l`)",
            )
        weakref.finalize(owner, _unpin, tensor).atexit = False  # it holds the tensor until then
    log.info("pinned %s of memory for swapping in %.1f s", size, time.perf_counter() - begin)


def _unpin(tensor: Tensor) -> None:
    torch.cuda.synchronize()  # a copy may be under way
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
