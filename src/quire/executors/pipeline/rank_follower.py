"""The process of a rank other than 0 of a stage that several ranks compute: it does what rank 0 of its stage says.

Started as `python -m quire.executors.pipeline.rank_follower SOCKET MEMORY RANK SIZE PARENT`, as other ranks are."""

import os
import sys

from quire.executors.backends import Turn
from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.slots import num_micro_batches, received_from, shared_slots
from quire.executors.pipeline.stage import begin_stage, divide_model, room_of_all, with_slots
from quire.executors.ranks.follower import FollowerExecutor, follow, started_options
from quire.executors.ranks.messages import StartRank
from quire.executors.ranks.rank import new_rank_ops
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Family, family
from quire.ops.kv_spec import KVSpec
from quire.ops.opset import OpSet
from quire.ops.ranks.group import RankGroup
from quire.ops.stages.opset import StageOps
from quire.runtime.adapters import LoraAdapters
from quire.runtime.kv import longest
from quire.weights.checkpoint import Checkpoint


class StageRankFollower(FollowerExecutor):
    def __init__(self, start: StartRank, group: RankGroup) -> None:
        super().__init__(start.path, started_options(start), group)
        self._stage, self._num_stages = start.stage, start.num_stages
        self._turn = Turn(start.turn + group.rank, start.num_turns)

    @property
    def _ahead(self) -> int:
        return num_micro_batches(self._num_stages) - 1

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> StageOps:  # type: ignore[override]
        ops = StageOps(new_rank_ops(self.ops_type, options, self.group, turn=self._turn))
        if self._stage:
            checkpoint, length = self._open(), longest(config, options.max_model_len)
            kind = family(checkpoint.config.architecture)
            parts = divide_model(kind, checkpoint, config, length, self._num_stages)
            slots = shared_slots(self.group, options, parts[self._stage - 1].handed_columns, self._num_stages)
            ops.received = received_from(slots, options, ops)
        return ops

    def _gpu_room(self, spec: KVSpec) -> int:
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
        begin_stage(self._ops, self.options, *given, stage=self._stage, num_stages=self._num_stages)
        return LocalExecutor._load_model(self, *given)


def main(file: int, memory: int, rank: int, size: int, parent: int) -> int:
    group = RankGroup(memory, rank, size)
    return follow(file, group, parent, lambda start: StageRankFollower(start, group))


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # at once: what it has is memory
