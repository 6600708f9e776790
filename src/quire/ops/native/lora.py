"""What adapters add to one linear layer, in C++."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.ops.compiled import native
from quire.ops.dequantize import as_floats, dequantize
from quire.ops.tensors import BF16, F16, F32, LoraDelta, StoredTensor, stored_floats

KEPT = (F32, F16, BF16)  # as they are stored


class PackedLowRank(NamedTuple):
    a: Any  # a native Matrix [hidden, inputs]
    parts: list[tuple[Any, int, int, float]]  # (a native Matrix, its first output, its first row of a, scale)


class NativeLoraSlots:
    """Adapters keep the type and the rank they are stored with: a slot is a place in a table, and costs nothing."""

    def __init__(self, num_inputs: int, sizes: Sequence[int], num_slots: int, max_rank: int) -> None:
        self.num_inputs, self.num_outputs, self.max_rank = num_inputs, sum(sizes), max_rank
        self._firsts = np.cumsum([0, *sizes]).tolist()
        self.native = native.AdapterSlots(
            num_inputs, self.num_outputs, num_slots, max_hidden=len(sizes) * max_rank, max_parts=len(sizes)
        )
        self._held: list[PackedLowRank | None] = [None] * num_slots  # what the table points to

    def pack(self, parts: Sequence[LoraDelta | None]) -> PackedLowRank | None:
        there = [(first, part) for first, part in zip(self._firsts, parts, strict=False) if part is not None]
        if not there:
            return None
        tops = [_kept(part.a) for _, part in there]
        if len({top.type.name for top in tops}) > 1:
            tops = [stored_floats(top.name, dequantize(top)) for top in tops]
        data = np.concatenate([_data(top) for top in tops])
        a = native.Matrix(tops[0].type.name, [data], self.num_inputs, None, None)
        packed, hidden = [], 0
        for first, part in there:
            assert part.rank <= self.max_rank, f"rank {part.rank} in slots for {self.max_rank}"
            b = _kept(part.b)
            packed.append((native.Matrix(b.type.name, [_data(b)], part.rank, None, None), first, hidden, part.scale))
            hidden += part.rank
        return PackedLowRank(a, packed)

    def put(self, slot: int, packed: PackedLowRank | None) -> None:
        a, parts = packed or (None, [])
        self.native.put(slot, a, parts)
        self._held[slot] = packed


def _kept(tensor: StoredTensor) -> StoredTensor:
    return tensor if tensor.type in KEPT else as_floats(tensor)


def _data(tensor: StoredTensor) -> Any:
    data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
    return np.ascontiguousarray(data)
