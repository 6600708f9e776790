"""What every stage does: load its layers of a model, allocate its part of the KV cache."""

import os
import socket
from dataclasses import replace
from typing import Any, TypeVar

from quire.core.errors import Unsupported
from quire.executors.backends import Turn, new_ops
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.links import HiddenSlots, RankReceiver, Receiver, receiver
from quire.executors.pipeline.slots import num_micro_batches, received_from, shared_slots
from quire.executors.pipeline.stage_model import StageModel, divide_model
from quire.executors.pipeline.stage_ranks import StageRanks
from quire.executors.protocol import Capacity
from quire.executors.ranks.processes import OnLoss, die_like
from quire.executors.ranks.rank import check_ranks, num_threads, own_threads
from quire.models.config import ModelConfig, Seq2SeqConfig
from quire.models.registry import family
from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.group import RankGroup
from quire.ops.stages.opset import StageOps
from quire.ops.stages.parts import check_stages
from quire.runtime.kv import KVSize, longest

StageOpsType = TypeVar("StageOpsType", bound=StageOps)


def own_options(options: ExecutorOptions, index: int, size: int) -> ExecutorOptions:
    """With the threads of one stage: `options.threads` are those of all stages together."""
    return replace(options, threads=own_threads(options.threads or num_threads(), RankIndex(index, size)))


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


class StageExecutor(StageModel):
    """One of several stages. Processes are numbered as ranks are: 0 is the engine's, which has the last stage."""

    group: RankGroup
    members: StageRanks | None = None  # the other ranks of this stage
    received: HiddenSlots | None  # where the hidden states of the stage before are; None: this is the first
    of_ranks: HiddenSlots | None = None  # the same, where all ranks of this stage find them
    handed_on: HiddenSlots | None  # where those for the next stage are put; None: this is the last

    @property
    def stage(self) -> int:
        return (self.group.rank - 1) % self.group.size

    @property
    def num_stages(self) -> int:
        return self.group.size

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
