"""Experts whose matrices lie below each other in one tensor (DBRX, nomic-embed-text-v2), and experts without a gate."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.ops.opset import OpSet
from quire.ops.tensors import PackedExperts, StoredTensor, stored_floats


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Matrices of all experts below each other, `num_rows` rows each: those of `names` stacked for every expert.

    Where `transposed`, a stored matrix is [inputs, outputs]."""

    names: tuple[str, ...]
    num_experts: int
    num_rows: int
    num_columns: int
    transposed: bool = False

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ((name, (self.num_experts * self.num_rows, self.num_columns)) for name in self.names)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedExperts:
        return ops.pack_experts(
            [[self._of(expert, tensor) for tensor in tensors] for expert in range(self.num_experts)]
        )

    def _of(self, expert: int, tensor: StoredTensor) -> StoredTensor:
        part = tensor.part(expert * self.num_rows, self.num_rows)
        return part.transposed() if self.transposed else part


@dataclass(frozen=True, slots=True)
class UngatedExperts:
    """The up projections of experts without a gate, for an op that multiplies with one: they are its gate, and what
    stands for up is 1 everywhere.

    A name with `{}` in it, for the number of the expert, is one matrix `name.weight`; without, all lie below each
    other."""

    name: str
    num_experts: int
    num_outputs: int
    num_inputs: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if "{}" in self.name:
            shape = (self.num_outputs, self.num_inputs)
            yield from ((f"{self.name.format(expert)}.weight", shape) for expert in range(self.num_experts))
        else:
            yield self.name, (self.num_experts * self.num_outputs, self.num_inputs)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedExperts:
        size = self.num_outputs
        if "{}" not in self.name:
            tensors = [tensors[0].part(expert * size, size) for expert in range(self.num_experts)]
        # Bytes of zeros are zeros in every storage type.
        weights = [[tensor, replace(tensor, data=np.zeros_like(tensor.data), row_order=None)] for tensor in tensors]
        bias = [stored_floats("bias", np.full(size, value, np.float32)) for value in (0.0, 1.0)]
        return ops.pack_experts(weights, [bias] * self.num_experts)
