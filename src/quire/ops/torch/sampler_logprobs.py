"""Logprobs of lines that live on a device: what a line's answer needs is found there, in batches, and sent at once.

Spec: `_raw_logprobs` in ops/torch/sampler.py"""

from collections.abc import Sequence
from math import inf, log

import torch
from torch import Tensor

from quire.ops.torch.kernels.sample_totals import total_weights
from quire.ops.torch.sampler import FLOAT_MAX, ONE, Logprobs

LINES_AT_ONCE = 64  # temporaries are a few fp32 and int64 copies of that many lines


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
    peaks = raw.amax(dim=1)
    targets_on_device = torch.tensor(targets, device=raw.device)[:, None]
    own = raw.gather(1, targets_on_device)  # [n, 1]
    rank = 1 + (raw > own).sum(dim=1)
    ids = _best(raw, min(max(num_top, 0), raw.shape[1]))  # [n, num_top]
    columns = (peaks, total_weights(raw, peaks), own[:, 0], rank, ids, raw.gather(1, ids))
    found = []
    for target, peak, total, logit, place, top, values in zip(targets, *(c.tolist() for c in columns), strict=True):
        if peak == -inf:
            found.append([(target, -inf, 1)])
            continue
        greatest, whole = min(peak, FLOAT_MAX), log(total / ONE)
        line = [(target, min(logit - greatest, 0.0) - whole, place)]
        for count, (id, value) in enumerate(zip(top, values, strict=True)):
            if value == -inf:
                break
            tied = count > 0 and value == values[count - 1]
            line.append((id, min(value - greatest, 0.0) - whole, line[-1][2] if tied else 1 + count))
        found.append(line)
    return found


def _best(raw: Tensor, count: int) -> Tensor:
    """Ids [n, count] of the greatest logits, ties by id: the pair is made one integer that orders like it."""
    bits = raw.view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[1], device=raw.device)
    pairs = (keys << 32) | (0x7FFFFFFF - ids)
    return 0x7FFFFFFF - (pairs.topk(count, dim=1).values & 0x7FFFFFFF)
