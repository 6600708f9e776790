"""What forward passes use the matrices of a checkpoint for, told by its shapes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from quire.executors.draft_checkpoint import HeadCheckpoint
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Family
from quire.ops.kv_spec import KVSpec
from quire.ops.native.hidden_states import NativeHiddenStates
from quire.ops.native.recorder import SymbolicBatch
from quire.ops.ranks.roles import RoleOps, RoleRecorder, Roles
from quire.runtime.kv import kv_spec
from quire.weights.checkpoint import Checkpoint
from quire.weights.shapes import shapes_of

Load = Callable[[Any, Checkpoint], LoadedModel]  # (ops, checkpoint)


def trace_roles(family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int) -> Roles:
    """`spec`: of the cache of all ranks."""

    def load(ops: Any, shapes: Checkpoint) -> LoadedModel:
        return family.load(ops, shapes, config, max_model_len)

    return trace(load, checkpoint, config, spec)


def trace(load: Load, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec) -> Roles:
    """The roles of a model's matrices, found by loading and recording it with shapes instead of weights."""
    ops = RoleOps(_group(config, spec))
    model = load(ops, shapes_of(checkpoint))
    for forward in (model.forward, model.encode):
        if forward is not None:
            forward(RoleRecorder(spec, ops.roles), SymbolicBatch())  # type: ignore[arg-type]
    return ops.roles


def trace_head(head: HeadCheckpoint, load_target: Load, checkpoint: Checkpoint, spec: KVSpec) -> Roles:
    """The roles of the weights of a head, which may read some of the target's. `spec`: of the target's cache."""
    ops = RoleOps(1)
    target = load_target(ops, shapes_of(checkpoint))
    before = replace(ops.roles, matrices=list(ops.roles.matrices), tables=list(ops.roles.tables))
    loaded = replace(head, checkpoint=shapes_of(head.checkpoint)).load(ops, target)  # type: ignore[arg-type]
    roles = ops.roles
    if loaded.config is not None:
        spec = kv_spec(loaded.config, spec.block_size, spec.dtype)
        roles.group = _group(loaded.config, spec)
    hidden = NativeHiddenStates(np.zeros((1, loaded.columns), np.float32))
    for forward in loaded.forwards:
        forward(RoleRecorder(spec, roles, hidden), SymbolicBatch())  # type: ignore[arg-type]
    return Roles(
        roles.matrices[len(before.matrices) :],
        roles.tables[len(before.tables) :],
        {number - before.num_experts for number in roles.gates},
        roles.num_experts - before.num_experts,
        roles.group,
    )


def _group(config: ModelConfig, spec: KVSpec) -> int:
    """Query heads that share a KV head of the cache."""
    return 1 if spec.latent else config.heads // config.kv_heads
