"""Collectives against torch.distributed (gloo): what each rank brings, every rank has."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from quire.ops.ranks.cuts import RankIndex
from quire.ops.ranks.group import RankGroup, new_shared_memory
from quire.ops.reference.exchange import RankExchange

SIZE, ROWS, COLUMNS = 3, 5, 100


def part(rank: int) -> torch.Tensor:
    cut = RankIndex(rank, SIZE).even(COLUMNS)
    return torch.randn(ROWS, cut.count, generator=torch.Generator().manual_seed(rank))  # ranks are threads here


def in_ranks(work: Callable[[RankGroup], Any]) -> list[Any]:
    memory = new_shared_memory()
    groups = [RankGroup(memory, rank, SIZE) for rank in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(work, groups))


def gather_with_gloo(rank: int, store: Any) -> torch.Tensor:
    """gloo gathers parts of one size: the others are padded."""
    group = dist.ProcessGroupGloo(store, rank, SIZE, timedelta(seconds=20))
    widths = [RankIndex(other, SIZE).even(COLUMNS).count for other in range(SIZE)]
    padded = torch.nn.functional.pad(part(rank), (0, max(widths) - widths[rank]))
    gathered = [torch.empty_like(padded) for _ in range(SIZE)]
    group.allgather([gathered], [padded]).wait()
    return torch.cat([x[:, :width] for x, width in zip(gathered, widths, strict=True)], 1)


def test_columns_are_gathered_as_gloo_gathers_them() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(SIZE) as pool:
        theirs, *_ = pool.map(lambda rank: gather_with_gloo(rank, store), range(SIZE))

    def gather(group: RankGroup) -> torch.Tensor:
        exchange = RankExchange(group)
        cut = RankIndex(group.rank, SIZE).even(COLUMNS)
        for _ in range(50):  # both buffers, over and over
            gathered = exchange.all_columns(part(group.rank), [cut])
        return gathered

    for ours in in_ranks(gather):
        assert torch.equal(ours, theirs)


def test_fields_that_lie_side_by_side_are_gathered_at_once() -> None:
    def gather(group: RankGroup) -> torch.Tensor:
        index = RankIndex(group.rank, SIZE)
        cuts = [index.even(48), index.heads(32, 4, 2)]
        whole = torch.arange(80.0).repeat(ROWS, 1)
        own = [
            whole[:, start + cut.first : start + cut.first + cut.count]
            for start, cut in zip((0, 48), cuts, strict=True)
        ]
        return RankExchange(group).all_columns(torch.cat(own, 1), cuts)

    for gathered in in_ranks(gather):
        np.testing.assert_array_equal(gathered, np.tile(np.arange(80.0), (ROWS, 1)))


def test_a_rank_that_waits_hears_that_another_is_gone() -> None:
    from quire.ops.compiled import native

    memory = new_shared_memory()
    waits, leaves = (RankGroup(memory, rank, 2) for rank in range(2))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waits.barrier)
        leaves.native.abort()
        with pytest.raises(native.RankLost, match="another rank is gone"):
            waiting.result(timeout=60)
