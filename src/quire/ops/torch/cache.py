"""The paged KV cache as torch tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

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
LEAST_NUMBER = 2.0**-100  # a group with nothing above it is stored as zeros


class TorchCache:
    """k and v [layers, blocks, block_size, kv_heads, head_dim] on the device, and a second pair on the host. In int8
    they are codes, and each has units [layers, blocks, block_size, kv_heads] beside it. Where the cache is latent, v is
    the first columns of k."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_host_blocks: int, device: str) -> None:
        self.spec = spec
        self.pages = _allocate(spec, num_blocks, device)
        self._host = _allocate(spec, num_host_blocks, "cpu")
        self.k, self.v = _keys_and_values(spec, self.pages)
        self.host_k, self.host_v = _keys_and_values(spec, self._host)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy_blocks(self.pages, self.pages, pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy_blocks(self.pages, self._host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy_blocks(self._host, self.pages, pairs)

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


def _allocate(spec: KVSpec, num_blocks: int, device: str) -> tuple[Tensor, ...]:
    """k, v (no v where the cache is latent) and, in int8, the units of k and of v."""
    slots = (spec.num_layers, num_blocks, spec.block_size, spec.num_kv_heads)
    pages = [
        torch.zeros(*slots, spec.head_dim, dtype=DTYPES[spec.dtype], device=device)
        for _ in range(1 if spec.latent else 2)
    ]
    if spec.dtype == "int8":
        pages += [torch.zeros(slots, device=device) for _ in range(2)]
    return tuple(pages)


def _copy_blocks(sources: Sequence[Tensor], targets: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    for from_block, to_block in pairs:  # one after the other: a later pair may read what an earlier one wrote
        for source, target in zip(sources, targets, strict=True):
            target[:, to_block] = source[:, from_block]
