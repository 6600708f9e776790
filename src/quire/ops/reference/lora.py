"""LoRA adapters of one linear layer: arrays of one size for every slot, and the sum in plain torch."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.dequantize import dequantize
from quire.ops.tensors import LoraDelta, StoredTensor


class TorchLora(NamedTuple):
    """One adapter in main memory, of its own rank. There may be many more adapters than slots."""

    a: Tensor  # [parts, rank, inputs]
    b: Tensor  # [outputs, rank]
    scales: Tensor  # [parts]


class TorchLoraSlots:
    """An adapter of a smaller rank than the largest is padded with zeros, which add nothing."""

    def __init__(
        self,
        num_inputs: int,
        sizes: Sequence[int],
        num_slots: int,
        max_rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.sizes, self.num_slots = list(sizes), num_slots
        self.a = torch.zeros(num_slots, len(sizes), max_rank, num_inputs, device=device, dtype=dtype)
        self.b = torch.zeros(num_slots, sum(sizes), max_rank, device=device, dtype=dtype)
        self.scales = torch.zeros(num_slots, len(sizes), device=device)

    def pack(self, parts: Sequence[LoraDelta | None]) -> TorchLora | None:
        if not any(parts):
            return None
        rank = max(part.rank for part in parts if part is not None)
        a = torch.zeros_like(self.a[0, :, :rank], device="cpu")
        b = torch.zeros_like(self.b[0, :, :rank], device="cpu")
        scales = torch.zeros_like(self.scales[0], device="cpu")
        for index, (part, rows) in enumerate(zip(parts, b.split(self.sizes), strict=True)):
            if part is not None:
                a[index, : part.rank] = _tensor(part.a)
                rows[:, : part.rank] = _tensor(part.b)
                scales[index] = part.scale
        return TorchLora(a, b, scales)

    def put(self, slot: int, packed: TorchLora | None) -> None:
        for tensor in (self.a, self.b, self.scales):
            tensor[slot].zero_()
        if packed is not None:
            rank = packed.a.shape[1]
            self.a[slot, :, :rank], self.b[slot, :, :rank], self.scales[slot] = packed


def _tensor(stored: StoredTensor) -> Tensor:
    return torch.tensor(dequantize(stored)).reshape(stored.shape)


def add_lora(y: Tensor, x: Tensor, slots: TorchLoraSlots, adapters: Tensor) -> Tensor:
    """y [T, outputs] + scale * x[t] @ a.T @ b.T of the adapter in slot adapters[t]; slots below zero add nothing."""
    out = y.clone()
    for slot in adapters.unique().tolist():
        if slot >= 0:
            rows = (adapters == slot).nonzero()[:, 0]
            hidden = (x[rows] @ slots.a[slot].transpose(1, 2)) * slots.scales[slot, :, None, None].to(x.dtype)
            parts = slots.b[slot].split(slots.sizes)
            out[rows] += torch.cat([F.linear(h, b) for h, b in zip(hidden, parts, strict=True)], dim=1)
    return out
