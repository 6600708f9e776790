"""A stage that several ranks compute together: rank 0 follows the pipeline, and leads the others."""

from dataclasses import replace
from pathlib import Path

from quire.executors.backends import Turn
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.leader import start_arguments
from quire.executors.ranks.leader_ops import LeaderOps
from quire.executors.ranks.messages import AllocateRank, RankLoaded, StartRank, ToRank
from quire.executors.ranks.processes import OnLoss, RankProcess, RankProcesses
from quire.executors.ranks.rank import new_rank_ops
from quire.executors.ranks.sizes import counts, smallest
from quire.ops.ranks.group import RankGroup
from quire.ops.ranks.opset import RankOps
from quire.runtime.kv import KVSize


class StageRankProcess(RankProcess):
    module = "quire.executors.pipeline.rank_follower"


class StageRankProcesses(RankProcesses):
    def _start(self, rank: int, size: int, memory: int) -> RankProcess:
        return StageRankProcess(rank, size, memory)


class StageRanks:
    """The other ranks of a stage, as its rank 0 sees them."""

    def __init__(
        self, path: str | Path, options: ExecutorOptions, stage: int, num_stages: int, turn: Turn, on_loss: OnLoss
    ) -> None:
        """`options.threads`: those of this stage. `turn`: of rank 0."""
        self._options, self._turn = options, turn
        self.processes = StageRankProcesses(options.tensor_parallel_size, on_loss)
        self.weight_bytes = 0
        path_and_options = start_arguments(path, options)
        of_stage = stage, num_stages, turn.index, turn.size
        self.processes.tell(StartRank(*path_and_options, None, False, *of_stage))

    @property
    def group(self) -> RankGroup:
        return self.processes.group

    def new_ops(self, options: ExecutorOptions) -> LeaderOps:
        own = replace(options, threads=self._options.threads)
        return LeaderOps.leading(new_rank_ops(RankOps, own, self.group, turn=self._turn), self.processes)

    def tell(self, message: ToRank) -> None:
        self.processes.tell(message)

    def answers(self) -> None:
        self.processes.answers()

    def smallest(self, own: KVSize) -> KVSize:
        """The KV cache that all ranks have room for, once they have loaded their part."""
        loaded = [answer for answer in self.processes.answers() if isinstance(answer, RankLoaded)]
        self.weight_bytes = sum(one.weight_bytes for one in loaded)
        return smallest([own, *loaded])

    def allocate(self, size: KVSize) -> None:
        self.tell(AllocateRank(*counts(size)))

    def stop(self) -> None:
        self.processes.stop()
