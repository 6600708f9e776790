"""The process of a rank other than 0 of a stage that several ranks compute: it does what rank 0 of its stage says.

Started as `python -m quire.executors.pipeline.rank_follower SOCKET MEMORY RANK SIZE PARENT`, as other ranks are."""

import os
import sys

from quire.executors.local import LocalExecutor
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.stage import begin_stage, num_micro_batches
from quire.executors.pipeline.stage_ranks import ranks_received
from quire.executors.ranks.follower import FollowerExecutor, follow, started_options
from quire.executors.ranks.messages import StartRank
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.models.registry import Family
from quire.ops.kv_spec import KVSpec
from quire.ops.ranks.group import RankGroup
from quire.ops.stages.opset import StageOps
from quire.weights.checkpoint import Checkpoint


class StageRankFollower(FollowerExecutor):
    def __init__(self, start: StartRank, group: RankGroup) -> None:
        super().__init__(start.path, started_options(start), group)
        self._stage, self._num_stages = start.stage, start.num_stages

    @property
    def _ahead(self) -> int:
        return num_micro_batches(self._num_stages) - 1

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> StageOps:  # type: ignore[override]
        ops = StageOps(super()._new_ops(options, config))
        if self._stage:
            ops.received = ranks_received(self.group, options.max_num_batched_tokens, config.hidden)
        return ops

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
