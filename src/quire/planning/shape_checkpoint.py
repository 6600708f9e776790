"""A checkpoint that is known by its config.json alone: every tensor the model needs, in the types of a format."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import (
    BF16,
    F16,
    F32,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    TQ2_0,
    StorageType,
    StoredTensor,
)
from quire.planning.formats import TypeOf, find_format
from quire.planning.shapes import published_config, shape_config
from quire.planning.stored_types import StoredFormat, config_format, first_expert, short_name, stored_floats_type
from quire.weights.config import CheckpointConfig
from quire.weights.dummy_checkpoint import DummyCheckpoint

# Rows that are no multiple of 256 weights are stored in types with smaller blocks, as llama.cpp does.
_WITHOUT_SUPER_BLOCKS = {Q2_K: Q4_0, Q3_K: Q4_0, Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0, TQ2_0: Q4_0}


@dataclass(slots=True)
class ShapeCheckpoint(DummyCheckpoint):
    """A checkpoint whose tensors have the bytes of their shapes and nothing in them: all are views of one zero."""

    path: Path = field(default_factory=lambda: Path("config.json"))
    config: CheckpointConfig = field(kw_only=True)
    type_of: TypeOf = field(kw_only=True)
    num_layers: int = field(kw_only=True)
    without_blocks: StorageType = field(default=BF16, kw_only=True)  # of rows that no blocks hold
    known: Mapping[str, StorageType] = field(default_factory=dict, kw_only=True)  # by name, before `type_of`
    _kinds: dict[str, StorageType] = field(default_factory=dict)  # by name: those of all experts are alike

    def __post_init__(self) -> None: ...

    @property
    def nbytes(self) -> int:
        return sum(self.tensor(name).data.size for name in self.shapes)

    def tensor(self, name: str) -> StoredTensor:
        shape = self.shapes[name]
        if len(shape) < 2 or name.endswith("bias"):
            return StoredTensor(name, shape, F32, _zeros(shape, F32))
        kind = self.known.get(short_name(name)) or self._kind(first_expert(name), shape[-1])
        return ShapeTensor(name, shape, kind, _zeros(shape, kind))

    def _kind(self, name: str, num_columns: int) -> StorageType:
        if (kind := self._kinds.get(name)) is None:
            kind = self.type_of(name, self.num_layers)
            while num_columns % kind.block:
                kind = _WITHOUT_SUPER_BLOCKS.get(kind, self.without_blocks)
            self._kinds[name] = kind
        return kind


class ShapeTensor(StoredTensor):
    """A stored tensor that may be turned around in any type: its bytes mean nothing."""

    def part(self, first: int, count: int) -> StoredTensor:
        """Heads that are cut out of a quantized matrix become fp16 (`as_floats`), which nothing has to compute here."""
        kind = F16 if len(self.shape) == 2 and self.type.block > 1 else self.type
        shape = (count, *self.shape[1:])
        return ShapeTensor(self.name, shape, kind, _zeros(shape, kind))

    def squeezed(self) -> StoredTensor:
        return ShapeTensor(self.name, self.shape[1:], self.type, self.data)

    def ordered(self, order: NDArray[np.int32]) -> StoredTensor:
        shape = (len(order), *self.shape[1:])
        return ShapeTensor(self.name, shape, self.type, _zeros(shape, self.type))

    def transposed(self) -> StoredTensor:
        *outer, rows, columns = self.shape
        kind = self.type if rows % self.type.block == 0 else BF16
        shape = (*outer, columns, rows)
        return replace(self, shape=shape, type=kind, data=_zeros(shape, kind), row_order=None)


@cache
def _zeros(shape: tuple[int, ...], kind: StorageType) -> NDArray[np.uint8]:
    row_bytes = shape[-1] // kind.block * kind.block_bytes
    return np.broadcast_to(np.uint8(0), (prod(shape[:-1]), row_bytes))


def shape_checkpoint(config: CheckpointConfig, format_name: str | None = None) -> ShapeCheckpoint:
    """Without a format: floats as config.json's dtype says."""
    kind = stored_floats_type(config)
    type_of = find_format(format_name) if format_name else lambda name, num_layers: kind
    return ShapeCheckpoint(config=config, type_of=type_of, num_layers=_num_layers(config))


def published_checkpoint(name: str, format_name: str | None = None) -> ShapeCheckpoint:
    """A known shape. Without a format: stored as it is published."""
    config = published_config(name)
    stored = None if format_name else config_format(config, config.source.parent)
    return quantized_checkpoint(config, stored) if stored else shape_checkpoint(shape_config(name), format_name)


def quantized_checkpoint(
    config: CheckpointConfig, stored: StoredFormat, known: Mapping[str, StorageType] | None = None
) -> ShapeCheckpoint:
    """The checkpoint with tensors of the types that its `quantization_config` says. `known`: the types of tensors whose
    headers were read."""
    known = {short_name(name): kind for name, kind in (known or {}).items()}
    return ShapeCheckpoint(
        config=config, type_of=stored.type_of, num_layers=_num_layers(config), without_blocks=F32, known=known
    )


def _num_layers(config: CheckpointConfig) -> int:
    return config.int("num_hidden_layers", default=config.int("n_layer", default=config.int("num_layers", default=1)))
