"""What every stage does: load its layers of a model, allocate its part of the KV cache."""

import os
import socket
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from quire.core.errors import Unsupported
from quire.executors.backends import Turn, new_ops
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.links import HiddenSlots, RankReceiver, Receiver, receiver
from quire.executors.pipeline.slots import num_micro_batches, received_from, shared_slots
from quire.executors.pipeline.stage_ranks import StageRanks
from quire.executors.protocol import Capacity
from quire.executors.ranks.processes import OnLoss, die_like
from quire.executors.ranks.rank import check_experts, check_ranks, num_threads, own_threads
from quire.executors.ranks.shapes import trace_roles
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Family, family
from quire.ops.kv_spec import KVSpec, WindowSpec
from quire.ops.native.recorder import SymbolicBatch
from quire.ops.opset import OpSet
from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.group import RankGroup
from quire.ops.ranks.roles import RoleOps, RoleRecorder, Roles
from quire.ops.stages.opset import StageOps
from quire.ops.stages.parts import StagePart, check_stages, divide
from quire.ops.stages.trace import ColumnsForward, ModelTrace, TraceForward, TraceOps
from quire.runtime.adapters import LoraAdapters
from quire.runtime.kv import KVSize, kv_spec, longest
from quire.runtime.window_pages import windowed_layers
from quire.weights.checkpoint import Checkpoint
from quire.weights.shapes import shapes_of

MEASURED_BLOCK = 16  # tokens of a block: values have the same columns with any
StageOpsType = TypeVar("StageOpsType", bound=StageOps)


def own_options(options: ExecutorOptions, index: int, size: int) -> ExecutorOptions:
    """With the threads of one stage: `options.threads` are those of all stages together."""
    return replace(options, threads=own_threads(options.threads or num_threads(), RankIndex(index, size)))


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


def check_pipeline(options: ExecutorOptions, size: int, config: Any = None) -> None:
    """Refuse what stages cannot do; with the model's configuration, more stages than it has layers."""
    hint = "leave out pipeline_parallel_size"
    if not hasattr(os, "memfd_create"):
        raise Unsupported("several stages share memory as Linux has it", hint)
    if options.tensor_parallel_size > 1:
        check_ranks(options, options.tensor_parallel_size, config)
    elif options.enable_expert_parallel:
        raise Unsupported("a stage of one rank has all experts", "leave out enable_expert_parallel, or use -tp")
    if options.kv_disk_path:
        raise Unsupported("a KV cache of several stages is not kept on disk", "leave out kv_disk_path")
    if options.kv_transfer is not None:
        raise Unsupported("a KV cache of several stages is not sent to other engines", "leave out kv_transfer_config")
    if options.speculation is not None and (options.speculation.model or options.speculation.head):
        raise Unsupported("several stages have no draft model", "use the speculative method ngram or suffix")
    if isinstance(config, Seq2SeqConfig):
        raise Unsupported(f"a `{config.architecture}`, which has an encoder, is not divided into stages", hint)
    if config is not None:
        check_stages(size, config.layers)


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


class StageExecutor(LocalExecutor):
    """One of several stages. Processes are numbered as ranks are: 0 is the engine's, which has the last stage."""

    group: RankGroup
    members: StageRanks | None = None  # the other ranks of this stage
    received: HiddenSlots | None  # where the hidden states of the stage before are; None: this is the first
    of_ranks: HiddenSlots | None = None  # the same, where all ranks of this stage find them
    handed_on: HiddenSlots | None  # where those for the next stage are put; None: this is the last

    @property
    def stage(self) -> int:
        """From 0 on."""
        return (self.group.rank - 1) % self.group.size

    @property
    def _ahead(self) -> int:
        """The same in all stages: it decides how many window pages running sequences need."""
        return num_micro_batches(self.group.size) - 1

    @property
    def _on_loss(self) -> OnLoss:
        """What happens when another rank of this stage is gone: a stage ends as that rank did."""
        return die_like

    def _new_backend(self, options: ExecutorOptions) -> Any:
        """`options`: with the threads of this stage. Several ranks have an op set as one process has."""
        if options.tensor_parallel_size == 1:
            return new_ops(options, turn=self._turn)
        given = replace(self.options, threads=options.threads)
        self.members = StageRanks(self.path, given, self.stage, self.group.size, self._turn, self._on_loss)
        return self.members.new_ops(options)

    @property
    def _turn(self) -> Turn:
        """With its ranks. The engine's process has the first GPU."""
        num_ranks = self.options.tensor_parallel_size
        return Turn(self.group.rank * num_ranks, self.group.size * num_ranks)

    def _receiver(self, end: socket.socket, ops: StageOps) -> Receiver:
        assert self.received is not None
        received = receiver(end, self.received)
        return RankReceiver(received, self.received, self.of_ranks) if self.of_ranks else received

    def _connect(self, ops: StageOpsType, options: ExecutorOptions, config: ModelConfig) -> StageOpsType:
        """All stages map the slots of all."""
        size, checkpoint = self.group.size, self._open()
        length = longest(config, options.max_model_len)
        parts = divide_model(family(checkpoint.config.architecture), checkpoint, config, length, size)
        columns = [part.handed_columns for part in parts]
        shared = [shared_slots(self.group, options, columns[stage], size) for stage in range(size - 1)]
        slots: list[HiddenSlots | None] = [None, *shared, None]
        self.received, self.handed_on = slots[self.stage], slots[self.stage + 1]
        if self.received is not None:
            if self.members:
                self.of_ranks = shared_slots(self.members.group, options, columns[self.stage - 1], size)
            ops.received = received_from(self.of_ranks or self.received, options, ops)
        return ops

    def load(self) -> KVSize:
        try:
            own = super().load()
            return self.members.smallest(own) if self.members else own
        except BaseException:
            self.stop()
            raise

    def allocate(self, size: KVSize) -> Capacity:
        if self.members is None:
            return super().allocate(size)
        try:
            self.members.allocate(size)
            capacity = super().allocate(size)
            self.members.answers()
        except BaseException:
            self.stop()
            raise
        return capacity

    @property
    def weight_bytes(self) -> int:
        return super().weight_bytes + (self.members.weight_bytes if self.members else 0)

    def stop(self) -> None:
        super().stop()
        if self.members:
            self.members.stop()
            self.members = None

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
        begin_stage(self._ops, self.options, *given, stage=self.stage, num_stages=self.group.size)
        return LocalExecutor._load_model(self, *given)
