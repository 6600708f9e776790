"""The paged KV cache as torch tensors."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from quire.core.errors import DoesNotFit
from quire.ops.opset import KVSpec

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
MOST_FP8 = 448.0
MOST_CODE = 127
ALIGNMENT = 256  # bytes
LEAST_NUMBER = 2.0**-100  # a group with nothing above it is stored as zeros


class TorchCache:
    """k and v [layers, blocks, block_size, kv_heads, head_dim] on the device, and a second pair on the host. In int8
    they are codes, and each has units [layers, blocks, block_size, kv_heads] beside it. Where the cache is latent, v is
    the first columns of k.

    On a GPU the host's are pinned when they are made, and blocks travel without the host waiting for them."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_host_blocks: int, device: str) -> None:
        self.spec = spec
        on_gpu = torch.device(device).type == "cuda"
        self.pages = _pages_on_gpu(spec, num_blocks, device) if on_gpu else _zeros(spec, num_blocks, device)
        self._host = _pinned(spec, num_host_blocks, self) if on_gpu else _zeros(spec, num_host_blocks, "cpu")
        self.k, self.v = _keys_and_values(spec, self.pages)
        self.host_k, self.host_v = _keys_and_values(spec, self._host)
        self._move = _moved_by_kernel if on_gpu else move_blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._move(self.pages, self.pages, pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._move(self.pages, self._host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._move(self._host, self.pages, pairs)

    def write(self, layer: int, slots: Tensor, *vectors: Tensor) -> None:
        """k and v, or the one vector of a latent cache, [T, kv_heads, head_dim] each, to slots [T]."""
        if self.spec.dtype == "fp8":
            vectors = tuple(x.clamp(-MOST_FP8, MOST_FP8) for x in vectors)
        written = quantize(*vectors) if self.spec.dtype == "int8" else vectors
        for page, x in zip(self.pages, written, strict=True):
            page[layer].flatten(0, 1)[slots] = x.to(page.dtype)

    def read(self, layer: int, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of a block table, in fp32: k and v [length, kv_heads, head_dim]."""
        pages = tuple(page[layer, blocks].flatten(0, 1)[:length].float() for page in self.pages)
        k, v = _keys_and_values(self.spec, pages)
        if self.spec.dtype != "int8":
            return k, v
        k_units, v_units = pages[2:]
        return k * k_units[..., None], v * v_units[..., None]


def _keys_and_values(spec: KVSpec, pages: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return (pages[0], pages[0][..., : spec.latent]) if spec.latent else (pages[0], pages[1])


def quantize(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k and v [..., head_dim] -> their codes, and their units [...]: NaN for both where one of them is not finite."""
    finite = (k.isfinite() & v.isfinite()).all(-1)
    codes, units = [], []
    for x in (k, v):
        most = x.abs().amax(-1)
        some = finite & (most >= LEAST_NUMBER)
        factor = torch.where(some, MOST_CODE / most, 0.0)
        scaled = torch.where(finite[..., None], x * factor[..., None], 0.0)
        codes.append(scaled.round().to(torch.int8))
        units.append(torch.where(some, most / MOST_CODE, 0.0).masked_fill(~finite, float("nan")))
    return codes[0], codes[1], units[0], units[1]


def move_blocks(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    for from_block, to_block in pairs:  # one after the other: a later pair may read what an earlier one wrote
        for source, target in zip(sources, targets, strict=True):
            target[:, to_block] = source[:, from_block]


def _moved_by_kernel(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    from quire.ops.gpu.block_copy import copy_blocks

    copy_blocks(sources, targets, pairs)


# -- where pages lie ---------------------------------------------------------------------------------------------------


def _layout(spec: KVSpec, num_blocks: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Of k, v (no v where the cache is latent) and, in int8, the units of k and of v."""
    slots = (spec.num_layers, num_blocks, spec.block_size, spec.num_kv_heads)
    vectors = [((*slots, spec.head_dim), DTYPES[spec.dtype])] * (1 if spec.latent else 2)
    return [*vectors, *([(slots, torch.float32)] * 2 if spec.dtype == "int8" else [])]


def _zeros(spec: KVSpec, num_blocks: int, device: str) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in _layout(spec, num_blocks))


def _pages_on_gpu(spec: KVSpec, num_blocks: int, device: str) -> tuple[Tensor, ...]:
    try:
        return _zeros(spec, num_blocks, device)
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info()
        raise DoesNotFit(
            f"{num_blocks} blocks of KV cache need {num_blocks * spec.block_bytes / 2**30:.2f} GiB, "
            f"and {free / 2**30:.2f} GiB of the GPU's memory are free",
            "ask for less kv_cache_memory_bytes, or leave it out: what fits is taken",
        ) from error


def _pinned(spec: KVSpec, num_blocks: int, owner: object) -> tuple[Tensor, ...]:
    """Not cleared: a block is read only after it was written."""
    if num_blocks == 0:
        return _zeros(spec, 0, "cpu")
    from quire.ops.gpu.pinned import pinned

    layout = _layout(spec, num_blocks)
    sizes = [-(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in layout]
    parts = pinned(sum(sizes), owner).split(sizes)
    return tuple(
        part[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for part, (shape, dtype) in zip(parts, layout, strict=True)
    )
