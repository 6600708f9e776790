"""Logprobs of lines that live on a device: what a line's answer needs is found there, in batches, and sent at once.

Spec: `_raw_logprobs` in ops/torch/sampler.py"""

from collections.abc import Sequence
from math import inf, log

import torch
from torch import Tensor

from quire.ops.torch.sampler import FLOAT_MAX, ONE, Logprobs, distances, weights

LINES_AT_ONCE = 16  # temporaries are a few fp64 and int64 copies of that many lines


def raw_logprobs(logits: Tensor, lines: Sequence[int], targets: Sequence[int], num_top: int) -> list[Logprobs]:
    """Of each line of logits [R, vocab]: its target's (id, logprob, rank) and then the `num_top` most likely ones."""
    found: list[Logprobs] = []
    for start in range(0, len(lines), LINES_AT_ONCE):
        part = slice(start, start + LINES_AT_ONCE)
        at = torch.tensor(lines[part], device=logits.device)
        found += _of_lines(logits[at].float(), targets[part], num_top)
    return found


def _of_lines(logits: Tensor, targets: Sequence[int], num_top: int) -> list[Logprobs]:
    raw = torch.where(logits.isnan(), -inf, logits) + 0.0  # [n, vocab]; zero has one sign
    own = torch.tensor(targets, device=raw.device)[:, None]
    ids = torch.cat([own, _best(raw, min(max(num_top, 0), raw.shape[1]))], dim=1)  # [n, 1 + num_top]
    values = raw.gather(1, ids)
    ranks = 1 + torch.stack([(raw > column[:, None]).sum(dim=1) for column in values.T], dim=1)
    totals = torch.stack([weights(distances(line, 1.0)).sum() for line in raw])
    out = []
    for peak, total, *columns in zip(
        raw.amax(dim=1).tolist(), totals.tolist(), ids.tolist(), values.tolist(), ranks.tolist(), strict=True
    ):
        if peak == -inf:
            out.append([(columns[0][0], -inf, 1)])
            continue
        finite, whole = min(peak, FLOAT_MAX), log(total / ONE)
        line = [(id, min(x - finite, 0.0) - whole, rank) for id, x, rank in zip(*columns, strict=True)]
        out.append([line[0], *(entry for entry in line[1:] if entry[1] > -inf)])
    return out


def _best(raw: Tensor, count: int) -> Tensor:
    """Ids [n, count] of the greatest logits, ties by id: the pair is made one integer that orders like it."""
    bits = raw.view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[1], device=raw.device)
    pairs = (keys << 32) | (0x7FFFFFFF - ids)
    return 0x7FFFFFFF - (pairs.topk(count, dim=1).values & 0x7FFFFFFF)
