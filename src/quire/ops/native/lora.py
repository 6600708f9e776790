"""The LoRA adapters of one linear layer, in C++."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.ops.compiled import native
from quire.ops.dequantize import as_floats, dequantize
from quire.ops.tensors import BF16, F16, F32, LoraDelta, StoredTensor, stored_floats

KEPT_TYPES = (F32, F16, BF16)  # of A and B; other types become floats


class NativeLora(NamedTuple):
    """One packed adapter of a linear layer."""

    a: Any  # a native Matrix [hidden, inputs]
    parts: list[tuple[Any, int, int, float]]  # (a native Matrix, its first output, its first row of a, scale)


class NativeLoraSlots:
    """The adapter slots of a layer. An adapter keeps its stored type and rank, so an empty slot takes no memory."""

    def __init__(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> None:
        self.num_inputs, self.num_outputs, self.max_rank = num_inputs, sum(sizes), max_rank
        self._firsts = np.cumsum([0, *sizes]).tolist()
        self.native = native.AdapterSlots(
            num_inputs, self.num_outputs, num_slots, max_hidden=len(sizes) * max_rank, max_parts=len(sizes)
        )
        self._held: list[NativeLora | None] = [None] * num_slots  # the packed adapters that the native slots point to

    def pack(self, parts: Sequence[LoraDelta | None]) -> NativeLora | None:
        present = [(first, part) for first, part in zip(self._firsts, parts, strict=False) if part is not None]
        if not present:
            return None
        a_parts = [_kept(part.a) for _, part in present]
        if len({part.type.name for part in a_parts}) > 1:
            a_parts = [stored_floats(part.name, dequantize(part)) for part in a_parts]
        data = np.concatenate([_data(part) for part in a_parts])
        a = native.Matrix(a_parts[0].type.name, [data], self.num_inputs, None, None)
        packed, hidden = [], 0
        for first, part in present:
            assert part.rank <= self.max_rank, f"rank {part.rank} in slots for {self.max_rank}"
            b = _kept(part.b)
            packed.append((native.Matrix(b.type.name, [_data(b)], part.rank, None, None), first, hidden, part.scale))
            hidden += part.rank
        return NativeLora(a, packed)

    def put(self, slot: int, packed: NativeLora | None) -> None:
        a, parts = packed or (None, [])
        self.native.put(slot, a, parts)
        self._held[slot] = packed


def _kept(tensor: StoredTensor) -> StoredTensor:
    return tensor if tensor.type in KEPT_TYPES else as_floats(tensor)


def _data(tensor: StoredTensor) -> Any:
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    return np.ascontiguousarray(data)
