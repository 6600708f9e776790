"""The last stage: the executor of an engine whose layers are computed by several processes.

A step goes to all stages at once. The stages before the last compute it when its turn has come; the last computes it
when its output is awaited. Until then, further steps of other sequences can be submitted: micro-batches."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.core.plan import StepOutput, StepPlan
from quire.executors.backends import Turn
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.links import LinkClosed, Receiver
from quire.executors.pipeline.processes import StageProcesses
from quire.executors.pipeline.slots import num_micro_batches
from quire.executors.pipeline.stage import StageExecutor, check_pipeline, own_options
from quire.executors.pipeline.stage_model import with_slots
from quire.executors.pipeline.step_queue import QueuedCall, QueuedLogits, QueuedSampler, StepQueue
from quire.executors.protocol import Capacity
from quire.executors.ranks.leader import LeaderAdapters, RanksExecutor
from quire.executors.ranks.leader_ops import Tell, telling
from quire.executors.ranks.messages import MOVES, LoadRankAdapter, PutRankAdapter, RemoveRankAdapter, RunStep
from quire.executors.ranks.processes import OnLoss, die_like
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.ops.kv_spec import KVCache, KVSpec
from quire.ops.opset import Chain, OpSet, Program, ProgramSpec, Sampler, StepBatch
from quire.ops.stages.opset import StageCache, StageOps
from quire.runtime.adapters import LoadedAdapter, LoraAdapters
from quire.runtime.kv import KVSize


class PipelineExecutor(StageExecutor, RanksExecutor):
    """Starts the other stages, or connects to them, and tells them every step, move of blocks and adapter that it is
    told."""

    def __init__(
        self,
        path: str | Path,
        options: ExecutorOptions,
        size: int,
        dies_with_ranks: bool = False,
        addresses: Sequence[str] = (),
    ) -> None:
        """`addresses`: of all stages but the last, where they are on other machines."""
        self._addresses = addresses
        self._ends: deque[QueuedCall] = deque()  # of the steps in flight
        super().__init__(path, options, size, dies_with_ranks)

    def _check(self, options: ExecutorOptions, config: ModelConfig | None = None) -> None:
        check_pipeline(options, self.num_ranks, config)

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> "PipelineOps":  # type: ignore[override]
        self._check(options, config)
        self._start(self._new_processes)
        assert isinstance(self.ranks, StageProcesses) and self.ranks.last_end is not None
        own = options if self._addresses else own_options(options, self.stage, self.num_ranks)
        ops = self._connect(PipelineOps(self._new_backend(own), self.ranks), options, config)
        ops.link = self._receiver(self.ranks.last_end, ops)
        return ops

    @property
    def _turn(self) -> Turn:
        return Turn(0, self.options.tensor_parallel_size) if self._addresses else super()._turn

    def _new_processes(self, size: int, on_loss: OnLoss) -> StageProcesses:
        if not self._addresses:
            return StageProcesses(size, on_loss)
        from quire.executors.pipeline.greeting import files_digest
        from quire.executors.pipeline.remote import RemoteStages

        return RemoteStages(self._addresses, files_digest(Path(self.path)), on_loss)

    @property
    def _on_loss(self) -> OnLoss:
        return die_like if self._dies_with_ranks else None

    def allocate(self, size: KVSize) -> Capacity:
        capacity = replace(super().allocate(size), micro_batches=num_micro_batches(self.num_ranks))
        self.submit, self.collect = self._submit, self._collect
        return capacity

    def _submit(self, plan: StepPlan) -> None:
        self.runner.submit(plan)
        self._ends.append(self._ops.queue.put(self._ops.end_step))

    def _collect(self) -> StepOutput:
        """Also a step that samples nothing is computed when it is collected: its hidden states make room for others."""
        output = self.runner.collect()
        self._ends.popleft().result()
        return output

    def _new_adapters(self, ops: OpSet, model: LoadedModel) -> LoraAdapters | None:
        if not self.options.max_loras:
            return None
        slots = self.options.max_loras, self.options.max_lora_rank
        tell_members = self.members.tell if self.members else lambda message: None
        adapters = QueuedAdapters(ops, model, *slots, self.ranks.tell, tell_members, self._ops.queue)
        return with_slots(adapters, self._ops)

    def add_adapter(self, key: str, loaded: LoadedAdapter) -> None:
        """The other ranks of this stage learn of it at once: one that is to be removed first is, before that."""
        if self.members:
            self._ops.queue.put(lambda: None).result()
            self.members.tell(LoadRankAdapter(key, self._paths[loaded.digest]))
            self.members.answers()
        super().add_adapter(key, loaded)


class PipelineOps(StageOps):
    """What its caches, programs and samplers do waits for its turn, and the other stages do it too."""

    link: Receiver

    def __init__(self, ops: Any, processes: StageProcesses) -> None:
        super().__init__(ops)
        self._processes = processes
        self.queue = StepQueue()

    def end_step(self) -> None:
        """Its hidden states make room for others."""
        if wait := getattr(self.received, "wait", None):  # a GPU's
            wait()

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> "QueuedCache":
        own = super().new_cache(spec, num_blocks, num_host_blocks)
        return QueuedCache(own, self._processes.tell, self.queue)

    def new_sampler(self, num_rows: int, vocab_size: int) -> Any:
        own: Sampler = self.backend.new_sampler(num_rows, vocab_size)
        return QueuedSampler(own, self.queue)

    def compile(self, forward: Callable[[Any, Any], Any], cache: KVCache, spec: ProgramSpec) -> "QueuedProgram":
        if isinstance(spec.sampler, QueuedSampler):
            spec = replace(spec, sampler=spec.sampler.own)
        return QueuedProgram(super().compile(forward, cache, spec), self.link, self._processes, self.queue)


class QueuedCache(StageCache):
    def __init__(self, cache: StageCache, tell: Tell, queue: StepQueue) -> None:
        super().__init__(cache.spec, cache.own)
        for how in MOVES:
            setattr(self, how, telling(how, _queued(getattr(cache, how), queue), 0, tell))
        self.join_swaps = self._join_swaps
        self._queue = queue

    def _join_swaps(self) -> None:
        self._queue.put(self.own.join_swaps)


def _queued(call: Callable[[Any], None], queue: StepQueue) -> Callable[[Any], None]:
    def put(pairs: Any) -> None:
        queue.put(lambda: call(pairs))

    return put


class QueuedAdapters(LeaderAdapters):
    """What is removed while a step in flight waits for its turn is still there for it."""

    def __init__(
        self,
        ops: OpSet,
        model: LoadedModel,
        num_slots: int,
        max_rank: int,
        tell: Tell,
        tell_members: Tell,
        queue: StepQueue,
    ) -> None:
        """`tell`: the other stages. `tell_members`: the other ranks of this one."""
        super().__init__(ops, model, num_slots, max_rank, tell)
        self._tell_members, self._queue = tell_members, queue

    def add(self, key: str, loaded: LoadedAdapter) -> None:
        self._queue.put(lambda: LoraAdapters.add(self, key, loaded))

    def remove(self, key: str) -> None:
        def call() -> None:
            self._tell_members(RemoveRankAdapter(key))
            LoraAdapters.remove(self, key)

        self._queue.put(call)

    def put(self, slot: int, key: str) -> None:
        def call() -> None:
            self._tell_members(PutRankAdapter(slot, key))
            LoraAdapters.put(self, slot, key)

        self._tell(PutRankAdapter(slot, key))
        self._queue.put(call)


class QueuedProgram:
    takes_trees = False
    kept = None
    chain: Chain | None = None

    def __init__(self, own: Program, link: Receiver, processes: StageProcesses, queue: StepQueue) -> None:
        self._own, self._link, self._processes, self._queue = own, link, processes, queue
        self._num_steps = 0

    def run(self, batch: StepBatch) -> QueuedLogits:
        """-> logits, computed when they are awaited"""
        self._check()
        step = self._num_steps
        self._num_steps += 1
        self._processes.tell(RunStep.of(0, batch))
        return QueuedLogits(self._queue.put(lambda: self._run(step, batch)))

    def _run(self, step: int, batch: StepBatch) -> Any:
        try:
            batch.hidden_rows = self._link.receive(step, batch.num_tokens, self._check)
        except LinkClosed:
            raise self._processes.reason() from None
        return self._own.run(batch)

    def _check(self) -> None:
        if self._processes.lost:
            raise self._processes.lost
