"""Models that encode whole texts, computed by several ranks."""

from pathlib import Path
from typing import Any

from quire.core.errors import Unsupported
from quire.executors.encoder import EncoderExecutor, Load
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.leader import start_arguments
from quire.executors.ranks.leader_ops import LeaderOps
from quire.executors.ranks.messages import StartRank
from quire.executors.ranks.processes import RankProcesses, die_like
from quire.executors.ranks.rank import check_ranks, new_rank_ops
from quire.executors.ranks.shapes import trace
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.ops.ranks.group import RankGroup
from quire.ops.ranks.opset import RankOps
from quire.runtime.encoder import encoder_spec
from quire.runtime.pooling import PoolingMode
from quire.runtime.score_head import ScoreTokens
from quire.weights.checkpoint import Checkpoint


class RankEncoder(EncoderExecutor):
    """One of several ranks."""

    ops_type = RankOps

    def __init__(
        self,
        path: Path,
        options: ExecutorOptions,
        group: RankGroup,
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        score_tokens: ScoreTokens | None = None,
    ) -> None:
        self.group = group
        super().__init__(path, options, pooling, normalize, score_tokens)

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> Any:
        return new_rank_ops(self.ops_type, options, self.group, fp16_weights=options.dtype == "float16")

    def _load_model(
        self, ops: Any, load: Load, checkpoint: Checkpoint, config: ModelConfig, kv_dtype: str
    ) -> tuple[Any, LoadedModel]:
        self._ops = ops.for_model(trace(load, checkpoint, config, encoder_spec(config, kv_dtype)))
        return self._ops, load(self._ops, checkpoint)


class RanksEncoder(RankEncoder):
    """Rank 0, which starts the others."""

    def __init__(
        self,
        path: Path,
        options: ExecutorOptions,
        size: int,
        pooling: PoolingMode | None = None,
        normalize: bool | None = None,
        score_tokens: ScoreTokens | None = None,
        dies_with_ranks: bool = False,
    ) -> None:
        """`dies_with_ranks`: see RanksExecutor."""
        check_ranks(options, size)
        if options.on_gpu:
            raise Unsupported(
                f"tensor_parallel_size is {size}, and an encoder runs on one GPU", "leave it out, or use device cpu"
            )
        self._path, self._options, self._size = path, options, size
        self._dies_with_ranks = dies_with_ranks
        self._ranks: RankProcesses | None = None
        try:
            group: Any = None  # set when the processes are started
            super().__init__(path, options, group, pooling, normalize, score_tokens)
            assert self._ranks is not None
            self._ranks.answers()
        except BaseException:
            self.stop()
            raise

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> Any:
        check_ranks(options, self._size, config)
        self._ranks = RankProcesses(self._size, die_like if self._dies_with_ranks else None)
        self.group = self._ranks.group
        self._ranks.tell(StartRank(*start_arguments(self._path, self._options), encodes=True))
        return LeaderOps.leading(super()._new_ops(options, config), self._ranks)

    def stop(self) -> None:
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None
