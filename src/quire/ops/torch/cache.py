"""The paged KV cache as torch tensors."""

from collections.abc import Sequence

import torch

from quire.ops.opset import KVSpec

DTYPES = {"float16": torch.float16, "float32": torch.float32}


class TorchCache:
    """k and v [layers, blocks, block_size, kv_heads, head_dim] on the device, and a second pair on the host."""

    def __init__(self, spec: KVSpec, num_blocks: int, num_host_blocks: int, device: str) -> None:
        self.spec = spec
        block = (spec.block_size, spec.num_kv_heads, spec.head_dim)
        dtype = DTYPES[spec.dtype]
        self.k = torch.zeros(spec.num_layers, num_blocks, *block, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.host_k = torch.zeros(spec.num_layers, num_host_blocks, *block, dtype=dtype)
        self.host_v = torch.zeros_like(self.host_k)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy_blocks((self.k, self.v), (self.k, self.v), pairs)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy_blocks((self.k, self.v), (self.host_k, self.host_v), pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        _copy_blocks((self.host_k, self.host_v), (self.k, self.v), pairs)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [T, kv_heads, head_dim] to slots [T]."""
        self.k[layer].flatten(0, 1)[slots] = k.to(self.k.dtype)
        self.v[layer].flatten(0, 1)[slots] = v.to(self.v.dtype)

    def read(self, layer: int, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` tokens of a block table, in fp32: k and v [length, kv_heads, head_dim]."""
        k, v = self.k[layer, blocks], self.v[layer, blocks]
        return k.flatten(0, 1)[:length].float(), v.flatten(0, 1)[:length].float()


def _copy_blocks(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]
) -> None:
    for from_block, to_block in pairs:  # one after the other: a later pair may read what an earlier one wrote
        for source, target in zip(sources, targets, strict=True):
            target[:, to_block] = source[:, from_block]
