"""What ranks with the GPU's op set exchange, and two of them that share a GPU: its tokens, where the batch must not
matter. Without a GPU, ranks are threads, and gloo stands for NCCL.

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

from engine.gpu_serving import NUM_NEW, VOCAB, engine, run, save_llama
from quire.core.errors import EngineFailed, Unsupported
from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.executors.options import ExecutorOptions
from quire.executors.ranks.rank import check_ranks
from quire.ops.gpu.collectives import ColumnExchange, GpuRankOps, GroupExchange, HostExchange, all_outputs
from quire.ops.gpu.linear.grouped_config import grouped_config
from quire.ops.gpu.linear.linear import num_splits
from quire.ops.gpu.linear.scaled import scaled_config
from quire.ops.gpu.linear.w4a8 import w4a8_config
from quire.ops.gpu.weights import QUANTIZERS
from quire.ops.ranks.cuts import Cut
from quire.ops.ranks.group import RankGroup, new_shared_memory
from ranks.gpu_threads import OPTIONS
from ranks.processes import followers

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("kind", ["host", "gloo"])
def test_uneven_columns_are_gathered(kind: str) -> None:
    """Of values with one field and with three, which ranks have cut differently; twice, as a step follows a step."""
    size, totals = 3, (10, 4, 7)
    whole = torch.randn(5, sum(totals)).bfloat16()
    bounds = {10: (0, 4, 5, 10), 4: (0, 1, 2, 4), 7: (0, 3, 6, 7)}
    memory, store = new_shared_memory(), torch.distributed.HashStore()

    def gather(rank: int) -> list[torch.Tensor]:
        exchange = exchange_of(kind, RankGroup(memory, rank, size), store)
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


@pytest.mark.parametrize("kind", ["host", "gloo"])
def test_rows_of_all_ranks_are_gathered(kind: str) -> None:
    """What a rank has in the place of others' rows is anything, and goes nowhere."""
    size, owner = 3, torch.tensor([0, 2, 1, 2, 0])
    whole = torch.randn(5, 7).bfloat16()
    memory, store = new_shared_memory(), torch.distributed.HashStore()

    def gather(rank: int) -> torch.Tensor:
        group, own = RankGroup(memory, rank, size), owner == rank
        return exchange_of(kind, group, store).all_rows(torch.where(own[:, None], whole, torch.nan), own)

    with ThreadPoolExecutor(size) as pool:
        for gathered in pool.map(gather, range(size)):
            assert torch.equal(gathered, whole) and gathered.dtype == torch.bfloat16


def exchange_of(kind: str, group: RankGroup, store: Any) -> ColumnExchange:
    if kind == "host":
        return HostExchange(group)
    return GroupExchange(torch.distributed.ProcessGroupGloo(store, group.rank, group.size), group)


def test_sums_are_divided_as_those_of_all_outputs() -> None:
    """A segment of two fields, of which this rank has a part each, and one of another type."""
    cuts = [Cut(0, 4, 10), Cut(2, 2, 4), Cut(0, 3, 7)]
    assert all_outputs([6, 3], cuts) == [14, 7]
    assert all_outputs([9], cuts) == [21]
    assert all_outputs([4, 2, 3], cuts) == [10, 4, 7]


@pytest.mark.parametrize(("kind", "config"), [("int4", grouped_config), ("fp8", scaled_config), ("w4a8", w4a8_config)])
@pytest.mark.parametrize("num_rows", [1, 40, 300])
def test_sums_of_quantized_weights_are_divided_so_too(kind: str, config: Any, num_rows: int) -> None:
    weight, all_of_them = QUANTIZERS[kind](torch.randn(64, 2048)), 16384
    own, divided = (config(num_rows, weight, True, outputs).splits for outputs in (None, all_of_them))
    assert divided == num_splits(all_of_them, 2048) < own


def test_an_exchange_that_is_gone_is_watched_no_longer() -> None:
    before = set(threading.enumerate())
    exchange = exchange_of("gloo", RankGroup(new_shared_memory(), 0, 1), torch.distributed.HashStore())
    [watcher] = set(threading.enumerate()) - before
    assert watcher.is_alive()
    del exchange
    watcher.join(10)
    assert not watcher.is_alive()


def test_ranks_have_the_graphs_of_rank_0() -> None:
    memory = new_shared_memory()

    def agree(rank: int) -> list[list[int]]:
        group = RankGroup(memory, rank, 2)
        ops = GpuRankOps(group, HostExchange(group), **OPTIONS)
        return [ops._agree_on_sizes([1, 8, 16] if rank == 0 else [1, 4]), ops._agree_on_sizes([2 + rank])]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(agree, range(2))) == [[[1, 8, 16], [2]]] * 2


def test_what_ranks_on_gpus_cannot_do_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"kv_disk_path with ranks on GPUs.*\n.*leave out kv_disk_path"):
        check_ranks(ExecutorOptions(backend="cuda", kv_disk_path="/tmp"), 2)


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
