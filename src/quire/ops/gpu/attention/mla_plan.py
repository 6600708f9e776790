"""How MLA divides a step: prompts become runs of a few tokens, which go through the decode kernel.

The kernel reads a context once for a tile of 64 rows. The rows are the heads of one token where there are 64 or more,
else the heads of some neighbouring tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.gpu.attention.mla import MLALaunch, mla_launch
from quire.ops.gpu.attention.pages import Runs
from quire.ops.gpu.attention.plan import DecodePlan, num_workers, plan_decode
from quire.ops.gpu.attention.top_k import SeenPositions

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
    run_tokens = max(1, TILE_ROWS // num_heads)
    if prefills:
        runs = _split_runs(runs, positions, run_tokens)
    max_queries = run_tokens if prefills or batch_invariant else 1
    launch = mla_launch(max_queries * num_heads, dtype)
    tiles = launch.tiles(max_queries * num_heads)
    workers = num_workers(positions.device, launch.per_multiprocessor, tiles, runs.num_seqs, max_model_len)
    pieces = plan_decode(runs, workers, max_queries=max_queries, split_contexts=not batch_invariant)
    return LatentPlan(runs, pieces, launch)


def plan_sparse(seen: SeenPositions, *, num_heads: int, dtype: torch.dtype, batch_invariant: bool) -> LatentPlan:
    """Every token is a run whose context are the positions that it chooses."""
    num_tokens = len(seen.lengths)
    starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=seen.lengths.device)
    runs = Runs(starts, seen.lengths.clamp(max=seen.top_k), seen.tables)
    launch = mla_launch(num_heads, dtype)
    most = min(seen.top_k, seen.width)
    workers = num_workers(starts.device, launch.per_multiprocessor, launch.tiles(num_heads), num_tokens, most)
    return LatentPlan(runs, plan_decode(runs, workers, split_contexts=not batch_invariant), launch)


def _split_runs(runs: Runs, positions: Tensor, max_tokens: int) -> Runs:
    """Runs of at most `max_tokens` tokens, each with the context of its last token. Only the device knows how many
    there are, so the list is as long as it can get, and ends in empty runs."""
    starts = runs.seq_starts.long()
    counts = (starts.diff() + max_tokens - 1) // max_tokens
    ends = counts.cumsum(0)
    number = torch.arange(min(len(positions), len(positions) // max_tokens + runs.num_seqs), device=positions.device)
    owner = torch.searchsorted(ends, number, right=True).clamp(max=runs.num_seqs - 1)
    begin = starts[owner] + (number - (ends - counts)[owner]) * max_tokens
    new_starts = torch.cat([torch.minimum(begin, starts[-1]), starts[-1:]])
    context_lens = torch.where(number < ends[-1], positions[new_starts[1:] - 1] + 1, 0)
    return Runs(new_starts.int(), context_lens, runs.block_tables[owner])
