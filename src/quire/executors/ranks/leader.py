"""Rank 0: the executor of an engine whose model is computed by several processes."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.core.plan import StepOutput
from quire.executors.options import ExecutorOptions
from quire.executors.protocol import Capacity
from quire.executors.ranks.leader_ops import LeaderCache, LeaderOps, Tell
from quire.executors.ranks.messages import (
    AllocateRank,
    LoadRankAdapter,
    PutRankAdapter,
    RankLoaded,
    RemoveRankAdapter,
    StartRank,
)
from quire.executors.ranks.processes import OnLoss, RankProcesses, die_like
from quire.executors.ranks.rank import RankExecutor, check_ranks
from quire.executors.ranks.sizes import counts, smallest
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.ops.compiled import native
from quire.ops.kv_spec import KVCache
from quire.ops.opset import OpSet
from quire.ops.ranks.opset import RankOps
from quire.runtime.adapters import LoadedAdapter, LoraAdapters
from quire.runtime.kv import KVSize

if TYPE_CHECKING:
    from quire.runtime.disk_tier import DiskTier


class RanksExecutor(RankExecutor):
    """Starts the other ranks, and tells them every step, move of blocks and adapter that it is told."""

    def __init__(self, path: str | Path, options: ExecutorOptions, size: int, dies_with_ranks: bool = False) -> None:
        """`dies_with_ranks`: the process ends as a rank does, for a parent that restarts it. Otherwise steps raise."""
        self.num_ranks = size
        self._check(options)
        self._dies_with_ranks = dies_with_ranks
        self._ranks: RankProcesses | None = None
        self._others_bytes = 0  # of weights
        self._paths: dict[str, str] = {}  # digests of loaded adapters -> where they were read from
        super().__init__(path, options, None)  # type: ignore[arg-type]  # the group comes with the processes

    def _check(self, options: ExecutorOptions, config: ModelConfig | None = None) -> None:
        check_ranks(options, self.num_ranks, config)

    @property
    def ranks(self) -> RankProcesses:
        assert self._ranks is not None, "no rank is started"
        return self._ranks

    def _new_ops(self, options: ExecutorOptions, config: ModelConfig) -> RankOps:
        self._check(options, config)
        self._start(RankProcesses)
        return LeaderOps.leading(super()._new_ops(options, config), self.ranks)

    def _start(self, new_processes: Callable[[int, OnLoss], RankProcesses]) -> None:
        self._ranks = new_processes(self.num_ranks, die_like if self._dies_with_ranks else None)
        self.group = self.ranks.group
        drafting = self.options.speculation
        if drafting and not (drafting.model or drafting.head):
            drafting = None  # rank 0 drafts alone
        self.ranks.tell(StartRank(*start_arguments(self.path, self.options), drafting))

    def load(self) -> KVSize:
        """Load the model in all ranks -> the size of the KV cache that the rank with the least room has room for."""
        try:
            own = self._load_own()
            others = [answer for answer in self.ranks.answers() if isinstance(answer, RankLoaded)]
        except BaseException:
            self.stop()
            raise
        self._others_bytes = sum(one.weight_bytes for one in others)
        return smallest([own, *others])

    def _load_own(self) -> KVSize:
        """On GPUs, ranks meet while they load: one that cannot says why."""
        try:
            return super().load()
        except native.RankLost:
            self.ranks.answers()
            raise self.ranks.reason() from None

    def allocate(self, size: KVSize) -> Capacity:
        try:
            self.ranks.tell(AllocateRank(*counts(size)))
            capacity = super().allocate(size)
            self.ranks.answers()
        except BaseException:
            self.stop()
            raise
        if self.options.on_gpu:
            self.collect = self._checked_collect
        return replace(capacity, weight_bytes=capacity.weight_bytes + self._others_bytes)

    def _checked_collect(self) -> StepOutput:
        """What a GPU computes while a rank is gone is no output: it goes on without it."""
        output = self.runner.collect()
        if self.ranks.lost:
            raise self.ranks.lost
        return output

    def stop(self) -> None:
        super().stop()
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None

    def _new_store(self, size: KVSize, cache: KVCache) -> "DiskTier | None":
        """A file has the parts of all ranks of a block, one behind the other."""
        if (root := self._disk_path(self._model.config)) is None:
            return None
        from quire.executors.disk import open_disk_tier

        assert isinstance(cache, LeaderCache)
        return open_disk_tier(root, self.path, self.options, size, cache, cache.rank_bytes)

    # -- LoRA adapters

    @property
    def _adapters_type(self) -> Callable[..., LoraAdapters]:
        return partial(LeaderAdapters, tell=self.ranks.tell)

    def load_adapter(self, path: Path) -> LoadedAdapter:
        loaded = super().load_adapter(path)
        self._paths[loaded.digest] = str(path.absolute())
        return loaded

    def add_adapter(self, key: str, loaded: LoadedAdapter) -> None:
        self.ranks.tell(LoadRankAdapter(key, self._paths[loaded.digest]))
        self.ranks.answers()
        super().add_adapter(key, loaded)

    def remove_adapter(self, key: str) -> None:
        self.ranks.tell(RemoveRankAdapter(key))
        super().remove_adapter(key)


class LeaderAdapters(LoraAdapters):
    def __init__(self, ops: OpSet, model: LoadedModel, num_slots: int, max_rank: int, tell: Tell) -> None:
        super().__init__(ops, model, num_slots, max_rank)
        self._tell = tell

    def put(self, slot: int, key: str) -> None:
        self._tell(PutRankAdapter(slot, key))
        super().put(slot, key)


def start_arguments(path: str | Path, options: ExecutorOptions) -> tuple[str, dict[str, Any]]:
    """The fields of a rank's `StartRank`."""
    return str(Path(path).absolute()), asdict(replace(options, speculation=None, verifies_drafts=options.has_drafts))
