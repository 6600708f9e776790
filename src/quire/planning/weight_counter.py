"""An op set that loads nothing: it counts the bytes that the weights of a model take in a backend.

A model file cannot tell it from a backend, so every family that can be served can be counted. No weight is read: a
matrix is counted from its shape and the type it is stored in."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

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
        self.table_bytes = 0  # of embedding tables, as they are stored
        self._dummy_tables = 0
        self.biases_bytes = 0  # fp32, beside the matrices
        self.allocations: list[int] = []  # bytes of every matrix, in the order in which a backend packs them
        self.copies: list[int] = []  # bytes of what is held beside each of these while it is packed

    def pack(
        self, parts: Sequence[StoredTensor], bias: Sequence[StoredTensor] | None = None, keep: Keep = Keep.NOTHING
    ) -> PackedWeight:
        num_outputs, num_inputs = sum(part.num_rows for part in parts), parts[0].num_columns
        added = self._add(parts, keep)
        self.biases_bytes += 4 * num_outputs if bias else 0
        nbytes = sum(size for _, size in added) + (4 * num_outputs if bias else 0)
        return PackedWeight(num_outputs, num_inputs, nbytes, {kept_as for kept_as, _ in added})

    def _add(self, parts: Sequence[StoredTensor], keep: Keep = Keep.NOTHING) -> list[tuple[str, int]]:
        """-> the type and bytes of each part. Neighbours of one type are one matrix."""
        quantization = quantization_of(self.quantization, keep)
        added = [self.packing.packed(part, quantization) for part in parts]
        for part, (kept_as, nbytes) in zip(parts, added, strict=True):
            self.tensors.append(CountedTensor(part.name, part.shape, kept_as, nbytes))
        copies = sum(part.data.size for part in parts)
        if quantization is not None:  # one part in floats at a time, and all of them quantized
            copies = max(part.data.size for part in parts) + sum(nbytes for _, nbytes in added)
        for _, alike in groupby(added, key=lambda one: one[0]):
            self._allocate(sum(nbytes for _, nbytes in alike), copies)
        return added

    def _allocate(self, nbytes: int, copies: int) -> None:
        self.allocations.append(nbytes)
        self.copies.append(copies + self._dummy_tables)

    def pack_experts(
        self, experts: Sequence[Sequence[StoredTensor]], biases: Sequence[Sequence[StoredTensor]] | None = None
    ) -> PackedExperts:
        num_outputs, num_inputs = sum(part.num_rows for part in experts[0]), experts[0][0].num_columns
        first = len(self.allocations)
        added = [one for parts in experts for one in self._add(parts)]
        self._stack(first)
        self.biases_bytes += 4 * len(experts) * num_outputs if biases else 0
        nbytes = sum(size for _, size in added) + (4 * len(experts) * num_outputs if biases else 0)
        return PackedExperts(len(experts), num_outputs, num_inputs, nbytes, {kept_as for kept_as, _ in added})

    def _stack(self, first: int) -> None:
        """Make one of the allocations from `first` on, where the backend does."""
        if self.packing.stacks:
            self.allocations[first:] = [sum(self.allocations[first:])]
            self.copies[first:] = [sum(self.copies[first:])]

    def pack_heads(self, heads: Sequence[StoredTensor]) -> PackedHeads:
        num_outputs, num_inputs = heads[0].shape
        first = len(self.allocations)
        nbytes = sum(size for _, size in self._add(heads, Keep.ALL))
        self._stack(first)
        return PackedHeads(len(heads), num_outputs, num_inputs, nbytes, None)

    def vector(self, tensor: StoredTensor) -> Float32:
        size = tensor.num_rows * tensor.num_columns
        self.tensors.append(CountedTensor(tensor.name, tensor.shape, "F32", 4 * size))
        return np.broadcast_to(np.float32(0), (size,))

    def table(self, tensor: StoredTensor) -> RecordedTable:
        kept_as, nbytes = self.packing.table(tensor)
        self.tensors.append(CountedTensor(tensor.name, tensor.shape, kept_as, nbytes, is_table=True))
        self.table_bytes += tensor.data.size
        self._dummy_tables += tensor.data.size if tensor.dummy else 0  # others stay in the file
        if nbytes:
            self._allocate(nbytes, nbytes)
        return RecordedTable(tensor.type.name, tensor.data, None, tensor.num_columns)

    def conv_weight(self, tensor: StoredTensor) -> Float32:
        return self.vector(tensor).reshape(tensor.shape[0], -1).T

    def biases(self, table: Float32) -> Float32:
        return table

    def frequencies(self, inv_freq: Float32, scale: float) -> RecordedFrequencies:
        return RecordedFrequencies(inv_freq, scale)
