"""The paged KV cache in GPU memory: host blocks are pinned, and kernels copy blocks while the host goes on.

Blocks go to the host in a stream of their own, beside the step that is launched next; they come back in the stream of
the steps, since the next step reads them."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from quire.core.errors import DoesNotFit
from quire.ops.gpu.attention.pages import Pages
from quire.ops.gpu.block_copy import BESIDE, copy_blocks, to_device
from quire.ops.gpu.pinned import pinned
from quire.ops.kv_spec import KVSpec, StateSpec
from quire.ops.reference.cache import TorchCache, page_layout, zero_pages  # the layout is the specification's
from quire.ops.reference.states import TorchCheckpoints, TorchStates

ALIGNMENT = 256  # bytes


class GpuCache(TorchCache):
    """Without CUDA (kernels are interpreted on a CPU) it is the plain cache."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_host_blocks: int, device: str) -> None:
        self._has_cuda = torch.device(device).type == "cuda"
        self._beside = torch.cuda.Stream(device) if self._has_cuda else None
        self._saved: torch.cuda.Event | None = None  # the last swap to the host, until it is joined
        super().__init__(spec, num_blocks, num_host_blocks, device)
        if isinstance(self.windowed, GpuCache):
            self.windowed._beside = self._beside  # `swapped` waits for pages, too

    def _allocate_slots(self, states: StateSpec, device: str) -> TorchStates:
        try:
            return super()._allocate_slots(states, device)
        except torch.OutOfMemoryError as error:
            raise _slots_do_not_fit("state", states.num_slots, states.slot_bytes) from error

    def _allocate_checkpoints(self, states: StateSpec, device: str) -> TorchCheckpoints | None:
        try:
            return super()._allocate_checkpoints(states, device)
        except torch.OutOfMemoryError as error:
            raise _slots_do_not_fit("checkpoint", states.num_checkpoint_slots, states.checkpoint_bytes) from error

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

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self._beside is None:
            super().swap_out(pairs)
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            copy_blocks(self.pages, self.host_pages, pairs, max_programs=BESIDE)
            self._saved = torch.cuda.Event()
            self._saved.record()

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.join_swaps()
        super().swap_in(pairs)

    def swap_pages_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        super().swap_pages_out(pairs)
        if self.windowed is not None:  # the pages may have other owners in the step that is launched next
            self.windowed.join_swaps()

    def join_swaps(self) -> None:
        if self._saved is not None:
            self._saved.wait()
            self._saved = None

    def _on_device(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        return to_device(pairs, self.k.device)

    def pages_of(self, layer: int) -> Pages:
        """The pages of a layer: those of blocks, or window pages where it has a window."""
        in_page, number = self.spec.place(layer)
        cache = self.windowed if in_page and self.windowed else self
        k, v, *scales = (page[number] for page in cache.kv_pages)
        k_scales, v_scales = scales or (None, None)
        return Pages(k, v, k_scales, v_scales, *self.spec.fp8_scales_of(layer))

    def has_window(self, layer: int) -> bool:
        """Whether a layer is in window pages."""
        return self.windowed is not None and self.spec.place(layer)[0]

    def swapped(self) -> Callable[[], None]:
        if self._beside is None:
            return super().swapped()
        self._beside.wait_stream(torch.cuda.current_stream())
        event = torch.cuda.Event(blocking=True)
        event.record(self._beside)
        return lambda: event.synchronize()


def _slots_do_not_fit(kind: str, count: int, slot_bytes: int) -> DoesNotFit:
    free, _ = torch.cuda.mem_get_info()
    return DoesNotFit(
        f"{count} {kind} slots need {count * slot_bytes / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB of the GPU's "
        "memory are free",
        "ask for less kv_cache_memory_bytes, or leave it out: what fits is taken",
    )


def pinned_pages(spec: KVSpec, num_blocks: int, owner: object) -> tuple[Tensor, ...]:
    """Pages in one range of pinned memory, which is released with `owner`. Not cleared: blocks are written before they
    are read."""
    layout = page_layout(spec, num_blocks)
    sizes = [-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in layout]
    if sum(sizes) == 0:  # no blocks, or none with keys and values
        return zero_pages(spec, num_blocks, "cpu")
    parts = pinned(sum(sizes), owner).split(sizes)
    return tuple(
        part[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for part, (shape, dtype) in zip(parts, layout, strict=True)
    )
