"""Rank 0: the executor of an engine whose model is computed by several processes."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from quire.executors.options import ExecutorOptions
from quire.executors.protocol import Capacity
from quire.executors.ranks.messages import (
    AllocateRank,
    LoadRankAdapter,
    MoveBlocks,
    PutRankAdapter,
    RankLoaded,
    RemoveRankAdapter,
    RunStep,
    StartRank,
)
from quire.executors.ranks.processes import OnLoss, RankProcesses, die_like
from quire.executors.ranks.rank import RankExecutor, check_ranks
from quire.models.config import ModelConfig
from quire.models.loading import LoadedModel
from quire.ops.compiled import native
from quire.ops.opset import KVSpec, OpSet, Program, StepBatch
from quire.ops.ranks.opset import RankCache, RankOps
from quire.runtime.adapters import LoadedAdapter, LoraAdapters
from quire.runtime.kv import KVSize

Tell = Callable[[Any], None]


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
        ops = super()._new_ops(options, config)
        return LeaderOps(ops.backend, ops.index, self.ranks)

    def _start(self, new_processes: Callable[[int, OnLoss], RankProcesses]) -> None:
        self._ranks = new_processes(self.num_ranks, die_like if self._dies_with_ranks else None)
        self.group = self.ranks.group
        given = {**asdict(replace(self.options, speculation=None)), "speculation": None}
        self.ranks.tell(StartRank(str(Path(self.path).absolute()), given))

    def load(self) -> KVSize:
        """What the rank with the least room has room for."""
        try:
            own = super().load()
            others = [answer for answer in self.ranks.answers() if isinstance(answer, RankLoaded)]
        except BaseException:
            self.stop()
            raise
        self._others_bytes = sum(one.weight_bytes for one in others)
        sizes: list[KVSize | RankLoaded] = [own, *others]
        return KVSize(
            own.spec,
            min(one.num_blocks for one in sizes),
            min(one.num_host_blocks for one in sizes),
            min(one.max_model_len for one in sizes),
        )

    def allocate(self, size: KVSize) -> Capacity:
        try:
            self.ranks.tell(AllocateRank(size.num_blocks, size.num_host_blocks, size.max_model_len))
            capacity = super().allocate(size)
            self.ranks.answers()
        except BaseException:
            self.stop()
            raise
        return replace(capacity, weight_bytes=capacity.weight_bytes + self._others_bytes)

    def stop(self) -> None:
        super().stop()
        if self._ranks is not None:
            self._ranks.stop()
            self._ranks = None

    # -- LoRA adapters

    def _new_adapters(self, ops: OpSet, model: LoadedModel) -> LoraAdapters | None:
        return super()._new_adapters(ops, model) and LeaderAdapters(
            ops, model, self.options.max_loras, self.options.max_lora_rank, self.ranks.tell
        )

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


class LeaderOps(RankOps):
    """What its caches and programs do, those of the other ranks do too."""

    def __init__(self, ops: Any, index: Any, ranks: RankProcesses) -> None:
        super().__init__(ops, index)
        self._ranks = ranks
        self._num_caches = self._num_programs = 0

    def new_cache(self, spec: KVSpec, num_blocks: int, num_host_blocks: int = 0) -> RankCache:
        self._num_caches += 1
        own = super().new_cache(spec, num_blocks, num_host_blocks)
        return LeaderCache(own, self._num_caches - 1, self._ranks.tell)

    def compile(self, *args: Any, **named: Any) -> "LeaderProgram":
        self._num_programs += 1
        return LeaderProgram(super().compile(*args, **named), self._num_programs - 1, self._ranks)


class LeaderCache(RankCache):
    def __init__(self, cache: RankCache, number: int, tell: Tell) -> None:
        super().__init__(cache.spec, cache.own)
        for how in ("copy", "swap_out", "swap_in", "move"):
            setattr(self, how, telling(how, getattr(cache.own, how), number, tell))


def telling(how: str, own: Callable[[Any], None], number: int, tell: Tell) -> Callable[[Any], None]:
    def move(pairs: Sequence[tuple[int, int]]) -> None:
        tell(MoveBlocks(number, how, list(pairs)))
        own(pairs)

    return move


class LeaderProgram:
    takes_trees = False
    kept = None

    def __init__(self, own: Program, number: int, ranks: RankProcesses) -> None:
        self._own, self._number, self._ranks = own, number, ranks

    def run(self, batch: StepBatch) -> Any:
        """-> logits of all ranks"""
        if self._ranks.lost:
            raise self._ranks.lost
        self._ranks.tell(RunStep.of(self._number, batch))
        try:
            return self._own.run(batch)
        except native.RankLost:
            raise self._ranks.reason() from None
