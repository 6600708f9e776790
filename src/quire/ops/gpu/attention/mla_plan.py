"""How attention to a latent cache divides a step: prompts become runs of a few tokens, and go where decoding goes.

A kernel for a tile of 64 rows reads a context once for all of them. The rows are the heads of one token where there are
64 or more, else those of some neighbouring tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.gpu.attention.mla import MLALaunch, mla_launch
from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.attention.plan import DecodePlan, num_workers, plan_decode

TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class LatentPlan:
    runs: Runs
    pieces: DecodePlan
    launch: MLALaunch


def plan_latent(
    runs: Runs,
    positions: Tensor,
    *,
    prefills: bool,  # whether some sequence has several tokens
    num_heads: int,
    dtype: torch.dtype,
    max_model_len: int,
    batch_invariant: bool,
) -> LatentPlan:
    together = max(1, TILE_ROWS // num_heads)
    if prefills:
        runs = _cut(runs, positions, together)
    max_queries = together if prefills or batch_invariant else 1
    launch = mla_launch(max_queries * num_heads, dtype)
    tiles = launch.tiles(max_queries * num_heads)
    workers = num_workers(positions.device, launch.per_multiprocessor, tiles, runs.num_seqs, max_model_len)
    return LatentPlan(
        runs, plan_decode(runs, workers, max_queries=max_queries, split_contexts=not batch_invariant), launch
    )


def _cut(runs: Runs, positions: Tensor, most: int) -> Runs:
    """Runs of at most `most` tokens, each of which sees what its last token sees. Only the device knows how many there
    are: behind them there are empty ones."""
    starts = runs.seq_starts.long()
    counts = (starts.diff() + most - 1) // most
    ends = counts.cumsum(0)
    number = torch.arange(min(len(positions), len(positions) // most + runs.num_seqs), device=positions.device)
    owner = torch.searchsorted(ends, number, right=True).clamp(max=runs.num_seqs - 1)
    begin = starts[owner] + (number - (ends - counts)[owner]) * most
    new_starts = torch.cat([torch.minimum(begin, starts[-1]), starts[-1:]])
    context_lens = torch.where(number < ends[-1], positions[new_starts[1:] - 1] + 1, 0)
    return Runs(new_starts.int(), context_lens, runs.block_tables[owner])
