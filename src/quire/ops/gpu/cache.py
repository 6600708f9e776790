"""The paged KV cache in GPU memory: host blocks are pinned, and kernels copy blocks while the host goes on."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from quire.core.errors import DoesNotFit
from quire.ops.gpu.block_copy import copy_blocks
from quire.ops.gpu.pinned import pinned
from quire.ops.opset import KVSpec
from quire.ops.reference.cache import TorchCache, page_layout, zero_pages  # the layout is the specification's

ALIGNMENT = 256  # bytes


class GpuCache(TorchCache):
    """Without CUDA (kernels are interpreted on a CPU) it is the plain cache."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_host_blocks: int, device: str) -> None:
        self._has_cuda = torch.device(device).type == "cuda"
        super().__init__(spec, num_blocks, num_host_blocks, device)

    def _allocate(self, num_blocks: int, device: str) -> tuple[Tensor, ...]:
        try:
            return super()._allocate(num_blocks, device)
        except torch.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info()
            raise DoesNotFit(
                f"{num_blocks} blocks of KV cache need {num_blocks * self.spec.block_bytes / 2**30:.2f} GiB, "
                f"and {free / 2**30:.2f} GiB of the GPU's memory are free",
                "ask for less kv_cache_memory_bytes, or leave it out: what fits is taken",
            ) from error

    def _allocate_on_host(self, num_blocks: int) -> tuple[Tensor, ...]:
        return pinned_pages(self.spec, num_blocks, self) if self._has_cuda else super()._allocate_on_host(num_blocks)

    def _copy_blocks(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]
    ) -> None:
        if self._has_cuda:
            copy_blocks(sources, targets, pairs)
        else:
            super()._copy_blocks(sources, targets, pairs)

    def swapped(self) -> Callable[[], None]:
        if not self._has_cuda:
            return super().swapped()
        event = torch.cuda.Event(blocking=True)
        event.record()
        return lambda: event.synchronize()


def pinned_pages(spec: KVSpec, num_blocks: int, owner: object) -> tuple[Tensor, ...]:
    """Pages in one range of pinned memory, which is released with `owner`. Not cleared: blocks are written before they
    are read."""
    if num_blocks == 0:
        return zero_pages(spec, 0, "cpu")
    layout = page_layout(spec, num_blocks)
    sizes = [-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in layout]
    parts = pinned(sum(sizes), owner).split(sizes)
    return tuple(
        part[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for part, (shape, dtype) in zip(parts, layout, strict=True)
    )
