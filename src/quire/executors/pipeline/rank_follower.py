"""The process of a rank other than 0 of a stage that several ranks compute: it does what rank 0 of its stage says.

Started as `python -m quire.executors.pipeline.rank_follower SOCKET MEMORY RANK SIZE PARENT`, as other ranks are."""

import os
import sys

from quire.executors.backends import Turn
from quire.executors.options import ExecutorOptions
from quire.executors.pipeline.slots import num_micro_batches, received_from, shared_slots
from quire.executors.pipeline.stage_model import StageModel, divide_model
from quire.executors.ranks.follower import FollowerExecutor, follow, started_options
from quire.executors.ranks.messages import StartRank
from quire.executors.ranks.rank import new_rank_ops
from quire.models.config import ModelConfig
from quire.models.registry import family
from quire.ops.ranks.group import RankGroup
from quire.ops.stages.opset import StageOps
from quire.runtime.kv import longest


class StageRankFollower(StageModel, FollowerExecutor):
    def __init__(self, start: StartRank, group: RankGroup) -> None:
        super().__init__(start.path, started_options(start), group)
        self._start = start
        self._turn = Turn(start.turn + group.rank, start.num_turns)

    @property
    def stage(self) -> int:
        return self._start.stage

    @property
    def num_stages(self) -> int:
        return self._start.num_stages

    @property
    def _ahead(self) -> int:
        return num_micro_batches(self.num_stages) - 1

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> StageOps:  # type: ignore[override]
        ops = StageOps(new_rank_ops(self.ops_type, options, self.group, turn=self._turn))
        if self.stage:
            checkpoint, length = self._open(), longest(config, options.max_model_len)
            kind = family(checkpoint.config.architecture)
            parts = divide_model(kind, checkpoint, config, length, self.num_stages)
            slots = shared_slots(self.group, options, parts[self.stage - 1].handed_columns, self.num_stages)
            ops.received = received_from(slots, options, ops)
        return ops


def main(file: int, memory: int, rank: int, size: int, parent: int) -> int:
    group = RankGroup(memory, rank, size)
    return follow(file, group, parent, lambda start: StageRankFollower(start, group))


if __name__ == "__main__":
    status = main(*map(int, sys.argv[1:]))
    sys.stderr.flush()
    os._exit(status)  # at once: what it has is memory
