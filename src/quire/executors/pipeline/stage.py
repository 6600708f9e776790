"""What every stage does: load its layers of a model, allocate its part of the KV cache."""

import os
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from quire.core.errors import Unsupported
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.links import HiddenSlots
from quire.executors.ranks.rank import num_threads, own_threads
from quire.executors.ranks.shapes import CheckpointShapes
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Family
from quire.ops.native.hidden_states import NativeHiddenStates
from quire.ops.native.recorder import SymbolicBatch
from quire.ops.opset import KVSpec
from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.group import RankGroup
from quire.ops.stages.opset import StageOps
from quire.ops.stages.parts import StagePart, check_stages, divide
from quire.ops.stages.trace import TraceForward, TraceOps
from quire.weights.checkpoint import Checkpoint
from quire.weights.dummy_checkpoint import DummyCheckpoint

StageOpsType = TypeVar("StageOpsType", bound=StageOps)


def num_micro_batches(size: int) -> int:
    """Steps in flight: one for each stage to compute."""
    return size


def own_options(options: ExecutorOptions, index: int, size: int) -> ExecutorOptions:
    """With the threads of one stage: `options.threads` are those of all stages together."""
    return replace(options, threads=own_threads(options.threads or num_threads(), RankIndex(index, size)))


def trace_parts(
    family: Family, checkpoint: Checkpoint, config: ModelConfig, max_model_len: int, size: int
) -> list[StagePart]:
    """How a model is divided into stages."""
    is_dummy = isinstance(checkpoint, DummyCheckpoint)
    shapes = DummyCheckpoint(checkpoint.path) if is_dummy else CheckpointShapes(checkpoint)
    ops = TraceOps()
    model = family.load(ops, shapes, config, max_model_len)
    model.forward(TraceForward(ops.trace), SymbolicBatch())
    return divide(ops.trace, config.layers, size)


def shared_slots(group: RankGroup, config: ModelConfig, max_tokens: int) -> list[HiddenSlots]:
    """Of every stage but the last, in order: what it hands to the next. All stages map the same memory."""
    num_slots = num_micro_batches(group.size)
    shape = num_slots * max_tokens, config.hidden
    nbytes = 4 * shape[0] * shape[1]
    arrays = [group.allocate(nbytes)[:nbytes].view(np.float32).reshape(shape) for _ in range(group.size - 1)]
    return [HiddenSlots(array, num_slots) for array in arrays]


def check_pipeline(options: ExecutorOptions, size: int, config: Any = None) -> None:
    """Refuse what stages cannot do; with the model's configuration, more stages than it has layers."""
    hint = "leave out pipeline_parallel_size"
    if not hasattr(os, "memfd_create"):
        raise Unsupported("several stages share memory as Linux has it", hint)
    if options.on_gpu:
        raise Unsupported(f"pipeline_parallel_size is {size}, and a model runs on one GPU", "use device cpu")
    if options.enable_expert_parallel:
        raise Unsupported("stages have all experts of their layers", "leave out enable_expert_parallel, or use -tp")
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


class StageExecutor(LocalExecutor):
    """One of several stages. Processes are numbered as ranks are: 0 is the engine's, which has the last stage."""

    group: RankGroup
    received: HiddenSlots | None  # where the hidden states of the stage before are; None: this is the first
    handed_on: HiddenSlots | None  # where those for the next stage are put; None: this is the last

    @property
    def stage(self) -> int:
        """From 0 on."""
        return (self.group.rank - 1) % self.group.size

    def _connect(self, ops: StageOpsType, options: ExecutorOptions, config: ModelConfig) -> StageOpsType:
        shared = shared_slots(self.group, config, options.max_num_batched_tokens)
        slots: list[HiddenSlots | None] = [None, *shared, None]
        self.received, self.handed_on = slots[self.stage], slots[self.stage + 1]
        ops.received = None if self.received is None else NativeHiddenStates(self.received.rows)
        return ops

    def _load_model(
        self, family: Family, checkpoint: Checkpoint, config: ModelConfig, spec: KVSpec, max_model_len: int
    ) -> LoadedModel:
        parts = trace_parts(family, checkpoint, config, max_model_len, self.group.size)
        self._ops.begin(parts[self.stage])
        return LocalExecutor._load_model(self, family, checkpoint, config, spec, max_model_len)
