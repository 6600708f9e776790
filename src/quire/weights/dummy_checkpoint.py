"""A model without weights: config.json says what it is, and the tensors are noise. For measuring speed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from quire.ops.tensors import BF16, StoredTensor
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_config

SPREAD = 0.02  # of the weights


@dataclass(slots=True)
class DummyCheckpoint:
    """Has whatever tensors a family asks for."""

    path: Path
    config: CheckpointConfig = field(init=False)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config = read_config(self.path)

    @property
    def nbytes(self) -> int:
        return 2 * sum(prod(shape) for shape in self.shapes.values())

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def tensor(self, name: str) -> StoredTensor:
        shape = self.shapes[name]
        noise = np.random.default_rng(len(name)).standard_normal(shape[-1], np.float32) * np.float32(SPREAD)
        row = (noise.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # the upper half of an fp32 is a bf16
        data = np.broadcast_to(row, (prod(shape[:-1]), len(row)))
        return StoredTensor(name, shape, BF16, data, dummy=True)

    def forget(self) -> None: ...
