"""Weights that no checkpoint stores: the same in all models of a family."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.ops.opset import Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor, stored_floats

ZERO_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Ones:
    """The weight of an RMS norm that has none."""

    size: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        return ops.vector(stored_floats("ones", np.ones(self.size, np.float32)))


@dataclass(frozen=True, slots=True)
class Repeated:
    """A matrix that repeats each of `count` columns `times` times, side by side: a number a head -> one a column."""

    count: int
    times: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        matrix = np.repeat(np.eye(self.count, dtype=np.float32), self.times, axis=0)
        return ops.pack([stored_floats("repeated", matrix)], keep=Keep.ALL)


@dataclass(frozen=True, slots=True)
class Constant:
    """A matrix of one value: [outputs, inputs]."""

    num_outputs: int
    num_inputs: int
    value: float = 1.0

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        matrix = np.full((self.num_outputs, self.num_inputs), self.value, np.float32)
        return ops.pack([stored_floats("constant", matrix)], keep=Keep.ALL)


@dataclass(frozen=True, slots=True)
class ConstantVector:
    size: int
    value: float

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from ()

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        return ops.vector(stored_floats("constant", np.full(self.size, self.value, np.float32)))


@dataclass(frozen=True, slots=True)
class StoredRow:
    """The stored vector `name` as a row for every token: `ops.linear(zero_columns(...), row)` [T, size]."""

    name: str
    size: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield self.name, (self.size,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        zeros = stored_floats("zeros", np.zeros((self.size, ZERO_COLUMNS), np.float32))
        return ops.pack([zeros], tensors, keep=Keep.ALL)


def zero_columns(ops: OpSet, x: Value, size: int) -> Value:
    """x [T, size] -> zeros [T, ZERO_COLUMNS]"""
    return ops.scale(ops.split(x, (ZERO_COLUMNS, size - ZERO_COLUMNS))[0], 0.0)
