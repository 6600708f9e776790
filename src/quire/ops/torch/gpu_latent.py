"""How attention to a latent cache divides a step: prompts become runs of a few tokens, and go where decoding goes.

A kernel for a tile of 64 rows reads a context once for all of them. The rows are the heads of one token where there are
64 or more, else those of some neighbouring tokens."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from quire.ops.opset import Int32
from quire.ops.torch.kernels.attention_mla import MLALaunch, mla_launch
from quire.ops.torch.kernels.attention_pages import Runs
from quire.ops.torch.kernels.attention_plan import DecodePlan, num_workers, plan_decode

TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class LatentPlan:
    runs: Runs
    pieces: DecodePlan
    launch: MLALaunch


def plan_latent(
    runs: Runs,
    positions: Tensor,
    starts: Int32 | None,  # seq_starts on the host, where some sequence has several tokens
    *,
    num_heads: int,
    dtype: torch.dtype,
    max_model_len: int,
    batch_invariant: bool,
) -> LatentPlan:
    together = max(1, TILE_ROWS // num_heads)
    if starts is not None:
        runs = _cut(runs, positions, starts, together)
    max_queries = 1 if starts is None and not batch_invariant else together
    launch = mla_launch(max_queries * num_heads, dtype)
    tiles = launch.tiles(max_queries * num_heads)
    workers = num_workers(positions.device, launch.per_multiprocessor, tiles, runs.num_seqs, max_model_len)
    return LatentPlan(runs, plan_decode(runs, workers, max_queries=max_queries, cuts=not batch_invariant), launch)


def _cut(runs: Runs, positions: Tensor, starts: Int32, most: int) -> Runs:
    """Runs of at most `most` tokens; each sees what its last token sees."""
    device = positions.device
    begins = [np.arange(begin, end, most) for begin, end in pairwise(starts.tolist())]
    owners = np.repeat(np.arange(len(begins)), [len(own) for own in begins])
    numbers = torch.from_numpy(np.concatenate([*begins, starts[-1:], owners]).astype(np.int32))
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    new_starts, owner = numbers.to(device, non_blocking=True).split([len(owners) + 1, len(owners)])
    context_lens = positions[new_starts[1:] - 1] + 1
    return Runs(new_starts, context_lens, runs.block_tables[owner])
