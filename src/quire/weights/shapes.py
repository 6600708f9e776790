"""A checkpoint known by its shapes."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from quire.ops.step_batch import Int32
from quire.ops.tensors import F32, StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.delegating_checkpoint import DelegatingCheckpoint
from quire.weights.dummy_checkpoint import DummyCheckpoint


class CheckpointShapes(DelegatingCheckpoint):
    """Names and shapes of a checkpoint. Its tensors are ones: no weight is read."""

    def tensor(self, name: str) -> StoredTensor:
        shape = self.shape(name)
        return StoredTensor(name, shape, F32, _ones(shape), dummy=True)

    def integers(self, name: str) -> Int32:
        return self._checkpoint.integers(name)  # type: ignore[attr-defined, no-any-return]

    def drop_pages(self) -> None: ...


def _ones(shape: Sequence[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    row = np.ones(shape[-1], np.float32).view(np.uint8)
    return np.broadcast_to(row, (prod(shape[:-1]), len(row)))


def shapes_of(checkpoint: Checkpoint) -> Checkpoint:
    """Another one with the same shapes. One without weights has those that a model file last asked for."""
    return replace(checkpoint) if isinstance(checkpoint, DummyCheckpoint) else CheckpointShapes(checkpoint)
