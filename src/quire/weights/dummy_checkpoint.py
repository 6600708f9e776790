"""A checkpoint without weights, for benchmarks: config.json, and tensors of noise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from quire.ops.tensors import BF16, StoredTensor
from quire.weights.config import CheckpointConfig
from quire.weights.huggingface import read_config

STANDARD_DEVIATION = 0.02  # of the weights


@dataclass(slots=True)
class DummyCheckpoint:
    """Has every tensor that a model file asks for."""

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
        noise = np.random.default_rng(len(name)).standard_normal(shape[-1], np.float32) * np.float32(STANDARD_DEVIATION)
        row = (noise.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # the upper 16 bits of an fp32 are a bf16
        data = np.broadcast_to(row, (prod(shape[:-1]), len(row)))
        return StoredTensor(name, shape, BF16, data, dummy=True)

    def drop_pages(self) -> None: ...
