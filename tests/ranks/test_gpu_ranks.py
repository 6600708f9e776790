"""Ranks with the GPU's op set: the bits of one device, where the batch must not matter.

Here ranks are threads, kernels are interpreted, and gloo stands for NCCL. On a GPU, two ranks share it:
python -m pytest tests/ranks/test_gpu_ranks.py"""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from engine.gpu_serving import NUM_NEW, VOCAB, engine, run, save_llama
from models.checking import PROMPT, TINY, random_model
from quire.core.errors import EngineFailed, Unsupported
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.rank import check_ranks
from quire.ops.gpu.collectives import GpuRankOps, GroupExchange, HostExchange
from quire.ops.gpu.opset import GpuOps
from quire.ops.ranks.cuts import Cut, RankIndex
from quire.ops.ranks.group import RankGroup, new_shared_memory
from quire.ops.ranks.opset import RankOps
from ranks.processes import followers
from ranks.rank_threads import OneProcess

ON_GPU = torch.cuda.is_available()
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "batch_invariant": True}


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


class Rank(OneProcess):
    def __init__(self, path: Path, group: Any) -> None:
        backend = GpuRankOps(group, HostExchange(group), **OPTIONS)
        self._load(RankOps(backend, RankIndex(group.rank, group.size)), path, None)


class GpuRanks:
    def __init__(self, path: Path, size: int) -> None:
        memory = new_shared_memory()
        self._turn = threading.Lock()
        self._ranks = [Rank(path, TakingTurns(RankGroup(memory, rank, size), self._turn)) for rank in range(size)]
        self._pool = ThreadPoolExecutor(size)

    def logits(self, ids: list[int], start: int = 0, adapter: int | None = None) -> np.ndarray:
        def run(rank: Rank) -> np.ndarray:
            with self._turn:
                return rank.logits(ids, start, adapter)

        first, *others = self._pool.map(run, self._ranks)
        assert all(np.array_equal(first, other) for other in others)
        return first


class OnOneDevice(OneProcess):
    def __init__(self, path: Path) -> None:
        self._load(GpuOps(**OPTIONS), path, None)


@pytest.mark.skipif(ON_GPU, reason="kernels are interpreted here")
def test_ranks_give_the_bits_of_one_device(tmp_path: Path) -> None:
    """Of a model whose heads are normed."""
    random_model(Qwen3Config(**{**TINY, "num_hidden_layers": 1}), seed=3).save_pretrained(tmp_path)
    alone, ranks = OnOneDevice(tmp_path), GpuRanks(tmp_path, 2)
    prompt = PROMPT[:9]
    for start, ids in ((0, prompt[:8]), (8, prompt)):
        np.testing.assert_array_equal(ranks.logits(ids, start), alone.logits(ids, start))


@pytest.mark.parametrize("kind", ["host", "gloo"])
def test_uneven_columns_are_gathered(kind: str) -> None:
    """Of values with one field and with three, which ranks have cut differently; twice, as a step follows a step."""
    size, totals = 3, (10, 4, 7)
    whole = torch.randn(5, sum(totals)).bfloat16()
    bounds = {10: (0, 4, 5, 10), 4: (0, 1, 2, 4), 7: (0, 3, 6, 7)}
    memory, store = new_shared_memory(), torch.distributed.HashStore()

    def gather(rank: int) -> list[torch.Tensor]:
        group = RankGroup(memory, rank, size)
        exchange: Any = HostExchange(group)
        if kind == "gloo":
            exchange = GroupExchange(torch.distributed.ProcessGroupGloo(store, rank, size), group)
        cuts = [Cut(bounds[n][rank], bounds[n][rank + 1] - bounds[n][rank], n) for n in totals]
        fields = whole.split(totals, dim=1)
        own = [one[:, cut.first : cut.first + cut.count] for one, cut in zip(fields, cuts, strict=True)]
        return [
            exchange.all_columns(torch.cat(own, dim=1), cuts),
            exchange.all_columns(own[0], cuts[:1]),
            exchange.all_columns(2 * own[0], cuts[:1]),
        ]

    with ThreadPoolExecutor(size) as pool:
        for first, second, third in pool.map(gather, range(size)):
            assert torch.equal(first, whole) and first.dtype == torch.bfloat16
            assert torch.equal(second, whole[:, :10]) and torch.equal(third, 2 * whole[:, :10])


def test_ranks_have_the_graphs_of_rank_0() -> None:
    memory = new_shared_memory()

    def agree(rank: int) -> list[list[int]]:
        group = RankGroup(memory, rank, 2)
        ops = GpuRankOps(group, HostExchange(group), **OPTIONS)
        return [ops._agree_on_sizes([1, 8, 16] if rank == 0 else [1, 4]), ops._agree_on_sizes([2 + rank])]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(agree, range(2))) == [[[1, 8, 16], [2]]] * 2


def test_what_ranks_on_gpus_cannot_do_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"enable_lora with ranks on GPUs.*\n.*leave out enable_lora"):
        check_ranks(ExecutorOptions(backend="cuda", max_loras=2), 2)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_that_share_a_gpu_give_its_tokens(tmp_path: Path, dtype: str) -> None:
    path = save_llama(tmp_path, 64)
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.8, seed=1, ignore_eos=True)
    make = np.random.default_rng(3)
    prompts = [make.integers(0, VOCAB, length).tolist() for length in (7, 130, 33, 1)]
    wanted = [Request(id=f"r{number}", prompt_ids=ids, params=params) for number, ids in enumerate(prompts)]
    found = []
    for size in (1, 2):
        with engine(path, dtype=dtype, batch_invariant=True, tensor_parallel_size=size) as served:
            found.append(run(served, wanted))
    assert found[0] == found[1]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_room_is_measured_by_all_ranks(tmp_path: Path) -> None:
    with engine(save_llama(tmp_path, 64), tensor_parallel_size=2, kv_cache_memory_bytes=None) as served:
        assert served.capacity.num_blocks > 100


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_killed_rank_ends_the_step_with_a_reason(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True, seed=0)
    with engine(save_llama(tmp_path, 64), tensor_parallel_size=2) as served:
        [rank] = followers(os.getpid())
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=r"rank 1 of 2 .* was killed by signal 9"):
            run(served, [Request(id="r", prompt_ids=[1, 2, 3], params=params)])
