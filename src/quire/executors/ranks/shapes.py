"""A checkpoint known by its shapes, and what a model's forward pass uses its matrices for."""

from collections.abc import Sequence
from math import prod

import numpy as np

from quire.models.config import ModelConfig
from quire.models.registry import Family
from quire.ops.native.recorder import SymbolicBatch
from quire.ops.opset import KVSpec
from quire.ops.ranks.roles import RoleOps, RoleRecorder, Roles
from quire.ops.tensors import F32, StoredTensor
from quire.weights.checkpoint import Checkpoint
from quire.weights.delegating_checkpoint import DelegatingCheckpoint
from quire.weights.dummy_checkpoint import DummyCheckpoint


class CheckpointShapes(DelegatingCheckpoint):
    """Names and shapes of a checkpoint. Its tensors are ones: no weight is read."""

    def tensor(self, name: str) -> StoredTensor:
        shape = self.shape(name)
        return StoredTensor(name, shape, F32, _ones(shape), dummy=True)

    def drop_pages(self) -> None: ...


def _ones(shape: Sequence[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    row = np.ones(shape[-1], np.float32).view(np.uint8)
    return np.broadcast_to(row, (prod(shape[:-1]), len(row)))


def trace_roles(family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int) -> Roles:
    """`spec`: of the cache of all ranks."""
    if isinstance(checkpoint, DummyCheckpoint):
        shapes: Checkpoint = DummyCheckpoint(checkpoint.path)
    else:
        shapes = CheckpointShapes(checkpoint)
    ops = RoleOps(group=1 if spec.latent else config.heads // config.kv_heads)
    model = family.load(ops, shapes, config, max_model_len)  # type: ignore[arg-type]
    for forward in (model.forward, model.encode):
        if forward is not None:
            forward(RoleRecorder(spec, ops.roles), SymbolicBatch())  # type: ignore[arg-type]
    return ops.roles
