"""An op set that loads nothing: it counts the bytes that the weights of a model take in a backend.

A model file cannot tell it from a backend, so every family that can be served can be counted. No weight is read: a
matrix is counted from its shape and the type it is stored in."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.ops.native.recorder import RecordedFrequencies, RecordedTable
from quire.ops.opset import Float32, Keep, quantization_of
from quire.ops.tensors import PackedExperts, PackedHeads, PackedWeight, StoredTensor
from quire.planning.packed_bytes import PackedFormat


@dataclass(frozen=True, slots=True)
class CountedTensor:
    """A weight: its shape, the type it is kept in, and how large it is then."""

    name: str
    shape: tuple[int, ...]
    type: str
    nbytes: int
    is_table: bool = False  # of embeddings


class WeightCounter:
    """Implements the part of `OpSet` that is called when a model is loaded. `StepCounter` has the ops."""

    def __init__(self, packing: PackedFormat, quantization: str | None = None) -> None:
        """`packing`: a backend's. `quantization`: as the backend is asked to quantize float matrices."""
        self.packing = packing
        self.quantization = quantization
        self.tensors: list[CountedTensor] = []

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        num_outputs, num_inputs = sum(part.num_rows for part in parts), parts[0].num_columns
        nbytes = self._add(parts, keep) + (4 * num_outputs if bias else 0)
        return PackedWeight(num_outputs, num_inputs, nbytes, None)

    def _add(self, parts: Sequence[StoredTensor], keep: Keep = Keep.NOTHING) -> int:
        quantization = quantization_of(self.quantization, keep)
        total = 0
        for part in parts:
            kept_as, nbytes = self.packing.packed(part, quantization)
            self.tensors.append(CountedTensor(part.name, part.shape, kept_as, nbytes))
            total += nbytes
        return total

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        num_outputs, num_inputs = sum(part.num_rows for part in experts[0]), experts[0][0].num_columns
        nbytes = sum(self._add(parts) for parts in experts) + (4 * len(experts) * num_outputs if biases else 0)
        return PackedExperts(len(experts), num_outputs, num_inputs, nbytes, None)

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        num_outputs, num_inputs = heads[0].shape
        return PackedHeads(len(heads), num_outputs, num_inputs, self._add(heads, Keep.ALL), None)

    def vector(self, tensor: StoredTensor) -> Float32:
        size = tensor.num_rows * tensor.num_columns
        self.tensors.append(CountedTensor(tensor.name, tensor.shape, "F32", 4 * size))
        return np.broadcast_to(np.float32(0), (size,))

    def table(self, tensor: StoredTensor) -> RecordedTable:
        kept_as, nbytes = self.packing.table(tensor)
        self.tensors.append(CountedTensor(tensor.name, tensor.shape, kept_as, nbytes, is_table=True))
        return RecordedTable(tensor.type.name, tensor.data, None, tensor.num_columns)

    def biases(self, table: Float32) -> Float32:
        return table

    def frequencies(self, inv_freq: Float32, scale: float) -> RecordedFrequencies:
        return RecordedFrequencies(inv_freq, scale)
