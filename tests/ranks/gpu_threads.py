"""Ranks with the GPU's op set as threads of one process: kernels are interpreted, and one rank computes at a time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from quire.ops.gpu.collectives import ColumnExchange, GpuRankOps, HostExchange
from quire.ops.gpu.opset import GpuOps
from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.group import RankGroup, new_shared_memory
from quire.ops.ranks.opset import RankOps
from ranks.rank_threads import OneProcess

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "batch_invariant": True}
Adapters = dict[str, Path] | None
NewExchange = Callable[[Any], ColumnExchange]  # of a group


class TakingTurns:
    """A group whose ranks, threads of one process, compute one at a time: the interpreter has one state."""

    def __init__(self, group: RankGroup, turn: threading.Lock) -> None:
        self._group, self._turn = group, turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def barrier(self) -> None:
        self._turn.release()
        try:
            self._group.barrier()
        finally:
            self._turn.acquire()


class OnOneDevice(OneProcess):
    def __init__(self, path: Path, adapters: Adapters = None, **options: Any) -> None:
        self._load(GpuOps(**{**OPTIONS, **options}), path, adapters)


class _Rank(OneProcess):
    def __init__(
        self,
        path: Path,
        group: Any,
        adapters: Adapters,
        experts: bool,
        new_exchange: NewExchange,
        options: dict[str, Any],
    ) -> None:
        backend = GpuRankOps(group, new_exchange(group), **{**OPTIONS, **options})
        index = RankIndex(group.rank, group.size, whole_groups=True)
        self._load(RankOps(backend, index, experts), path, adapters)


class GpuRanks:
    """`experts`: each rank has whole ones."""

    def __init__(
        self,
        path: Path,
        size: int,
        adapters: Adapters = None,
        experts: bool = False,
        new_exchange: NewExchange = HostExchange,
        **options: Any,
    ) -> None:
        memory = new_shared_memory()
        self._turn = threading.Lock()
        groups = [TakingTurns(RankGroup(memory, rank, size), self._turn) for rank in range(size)]
        self._ranks = [_Rank(path, group, adapters, experts, new_exchange, options) for group in groups]
        self._pool = ThreadPoolExecutor(size)

    def logits(self, ids: list[int], start: int = 0, adapter: int | None = None) -> np.ndarray:
        def run(rank: _Rank) -> np.ndarray:
            with self._turn:
                return rank.logits(ids, start, adapter)

        first, *others = self._pool.map(run, self._ranks)
        assert all(np.array_equal(first, other) for other in others)
        return first
