"""A checkpoint that is known by its config.json alone: every tensor the model needs, in the types of a format."""

from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import BF16, F32, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, StorageType, StoredTensor
from quire.planning.formats import TypeOf, find_format
from quire.weights.config import CheckpointConfig
from quire.weights.dummy_checkpoint import DummyCheckpoint

# Rows that are no multiple of 256 weights are stored in types with smaller blocks, as llama.cpp does.
_WITHOUT_SUPER_BLOCKS = {Q2_K: Q4_0, Q3_K: Q4_0, Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}


@dataclass(slots=True)
class ShapeCheckpoint(DummyCheckpoint):
    """Its tensors have the bytes of their shapes and nothing in them: all are views of one zero."""

    path: Path = field(default_factory=lambda: Path("config.json"))
    config: CheckpointConfig = field(kw_only=True)
    type_of: TypeOf = field(kw_only=True)
    num_layers: int = field(kw_only=True)

    def __post_init__(self) -> None: ...

    @property
    def nbytes(self) -> int:
        return sum(self.tensor(name).data.size for name in self.shapes)

    def tensor(self, name: str) -> StoredTensor:
        shape = self.shapes[name]
        if len(shape) < 2 or name.endswith("bias"):
            return StoredTensor(name, shape, F32, _zeros(shape, F32))
        kind = self.type_of(name, self.num_layers)
        while shape[-1] % kind.block:
            kind = _WITHOUT_SUPER_BLOCKS.get(kind, BF16)
        return ShapeTensor(name, shape, kind, _zeros(shape, kind))


class ShapeTensor(StoredTensor):
    """A stored tensor that may be turned around in any type: its bytes mean nothing."""

    def transposed(self) -> StoredTensor:
        *outer, rows, columns = self.shape
        kind = self.type if rows % self.type.block == 0 else BF16
        shape = (*outer, columns, rows)
        return replace(self, shape=shape, type=kind, data=_zeros(shape, kind), row_order=None)


def _zeros(shape: tuple[int, ...], kind: StorageType) -> NDArray[np.uint8]:
    row_bytes = shape[-1] // kind.block * kind.block_bytes
    return np.broadcast_to(np.uint8(0), (prod(shape[:-1]), row_bytes))


def shape_checkpoint(config: CheckpointConfig, format_name: str | None = None) -> ShapeCheckpoint:
    """Without a format: bfloat16."""
    layers = config.int("num_hidden_layers", default=config.int("n_layer", default=config.int("num_layers", default=1)))
    return ShapeCheckpoint(config=config, type_of=find_format(format_name or "bfloat16"), num_layers=layers)
