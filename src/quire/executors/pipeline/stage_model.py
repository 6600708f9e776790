"""The part of a model that a stage has: how a model is divided, and what a process loads of it."""

from dataclasses import replace
from itertools import chain
from typing import Any

from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.rank import check_experts
from quire.executors.ranks.shapes import trace_roles
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Family
from quire.ops.kv_spec import KVSpec, WindowSpec
from quire.ops.native.recorder import SymbolicBatch
from quire.ops.opset import OpSet
from quire.ops.ranks.roles import RoleOps, RoleRecorder, Roles
from quire.ops.stages.opset import StageOps
from quire.ops.stages.parts import StagePart, divide
from quire.ops.stages.trace import ColumnsForward, ModelTrace, TraceForward, TraceOps
from quire.runtime.adapters import LoraAdapters
from quire.runtime.kv import kv_spec
from quire.runtime.window_pages import windowed_layers
from quire.weights.checkpoint import Checkpoint
from quire.weights.shapes import shapes_of

MEASURED_BLOCK = 16  # tokens of a block: values have the same columns with any


def trace_model(family: Family, checkpoint: Checkpoint, config: ModelConfig, max_model_len: int) -> ModelTrace:
    """What each layer of a model has, and which values go from a layer to later ones."""
    ops = TraceOps()
    model = family.load(ops, shapes_of(checkpoint), config, max_model_len)
    model.forward(TraceForward(ops.trace), SymbolicBatch())
    carried = [ops.trace.carried(layer) for layer in range(1, config.layers)]
    if max(map(len, carried), default=1) > 1:
        ops.trace.columns = columns_of_values(family, checkpoint, config, max_model_len)
    else:
        ops.trace.columns = dict.fromkeys(chain(*carried), config.residual)
    return ops.trace


def columns_of_values(
    family: Family, checkpoint: Checkpoint, config: ModelConfig, max_model_len: int
) -> dict[int, int]:
    """By the numbers that the trace gives values."""
    spec = kv_spec(config, MEASURED_BLOCK, "float32")
    ops: Any = RoleOps(group=1)
    model = family.load(ops, shapes_of(checkpoint), config, max_model_len)
    measured = ColumnsForward(RoleRecorder(spec, ops.roles))
    model.forward(measured, SymbolicBatch())
    return measured.columns


def divide_model(
    family: Family, checkpoint: Checkpoint, config: ModelConfig, max_model_len: int, num_stages: int
) -> list[StagePart]:
    return divide(trace_model(family, checkpoint, config, max_model_len), config.layers, num_stages)


def begin_stage(
    ops: StageOps,
    options: ExecutorOptions,
    family: Family,
    checkpoint: Checkpoint,
    config: ModelConfig,
    spec: KVSpec,
    max_model_len: int,
    stage: int,
    num_stages: int,
) -> None:
    """The weights of the model come next, of which `ops` packs those of one stage."""
    traced = trace_model(family, checkpoint, config, max_model_len)
    part = divide(traced, config.layers, num_stages)[stage]
    if options.tensor_parallel_size > 1:
        roles = trace_roles(family, checkpoint, config, spec, max_model_len)
        check_experts(options, config, roles)
        ops.backend = ops.backend.for_model(own_roles(roles, traced, part))
    ops.begin(part)


def own_roles(roles: Roles, traced: ModelTrace, part: StagePart) -> Roles:
    """Of the weights of one stage, for ranks that have parts of them."""
    matrices, experts, tables = (traced.own_numbers(kind, part.weights) for kind in ("matrix", "experts", "table"))
    return roles.only(matrices, experts, tables)


def with_slots(adapters: LoraAdapters | None, ops: StageOps) -> LoraAdapters | None:
    """Adapters whose slots are bound. A GPU has no tape: no forward pass may run before adapters are loaded."""
    if adapters is not None:
        ops.bind_slots(adapters.forward, adapters.slots, SymbolicBatch())  # type: ignore[arg-type]
    return adapters


def room_of_all(room: int, spec: KVSpec, ops: StageOps, config: ModelConfig) -> int:
    """Bytes of the KV cache of all stages, of which this process's part takes at most `room`: in blocks, in window
    pages and in state slots."""
    if layers := windowed_layers(config):
        spec = replace(spec, windows=WindowSpec(layers, size=1, num_pages=1))
    own = ops.own_spec(spec)
    parts = [(spec.block_bytes, own.block_bytes), (spec.page_bytes, own.page_bytes)]
    if spec.states and own.states:
        parts.append((spec.states.slot_bytes, own.states.slot_bytes))
    return int(room * min((whole / part for whole, part in parts if part), default=1))


class StageModel(LocalExecutor):
    """An executor that loads one stage's layers: of all its weights, or a rank's part of each."""

    @property
    def stage(self) -> int:
        """From 0 on."""
        raise NotImplementedError

    @property
    def num_stages(self) -> int:
        raise NotImplementedError

    def _gpu_room(self, spec: KVSpec) -> int:
        """Of the KV cache of all stages, of which each has its part."""
        room = LocalExecutor._gpu_room(self, spec)
        if self.options.kv_cache_memory_bytes is not None:
            return room
        return room_of_all(room, spec, self._ops, self._model.config)

    def _new_adapters(self, ops: OpSet, model: LoadedModel) -> LoraAdapters | None:
        return with_slots(LocalExecutor._new_adapters(self, ops, model), self._ops)

    def _load_model(
        self, family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int
    ) -> LoadedModel:
        given = family, checkpoint, config, spec, max_model_len
        begin_stage(self._ops, self.options, *given, stage=self.stage, num_stages=self.num_stages)
        return LocalExecutor._load_model(self, *given)
