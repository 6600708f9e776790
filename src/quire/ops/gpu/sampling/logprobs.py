"""Logprobs of lines that live on a device: what a line's answer needs is found there, in batches, and sent at once.

Spec: `_raw_logprobs` in ops/reference/sampler.py"""

from collections.abc import Callable, Sequence
from math import inf, log

import torch
from torch import Tensor

from quire.ops.gpu.sampling.totals import total_weights
from quire.ops.reference.sampler import FLOAT_MAX, ONE, Logprobs

LINES_AT_ONCE = 64  # temporaries are a few fp32 and int64 copies of that many lines


def to_host(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to copy tensors from the device; call what it returns to wait for them."""
    copies = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)  # into pinned memory
    if not tensors[0].is_cuda:
        return lambda: copies
    event = torch.cuda.Event()
    event.record()

    def arrive() -> tuple[Tensor, ...]:
        event.synchronize()
        return copies

    return arrive


def begin_logprobs(logits: Tensor, lines: Sequence[int], targets: Tensor, num_top: int) -> Callable[[], list[Logprobs]]:
    """Of the given lines of logits [R, vocab]: the (id, logprob, rank) of the line's entry of targets [R], and then of
    the `num_top` most likely tokens. Call what it returns to wait for them. A target below 0 counts as 0."""
    parts = []
    for start in range(0, len(lines), LINES_AT_ONCE):
        at = torch.tensor(lines[start : start + LINES_AT_ONCE]).to(logits.device, non_blocking=True)
        parts.append(_of_lines(logits[at].float(), targets[at].long().clamp(min=0), num_top))
    return lambda: [line for part in parts for line in _read(*part())]


def _of_lines(logits: Tensor, targets: Tensor, num_top: int) -> Callable[[], tuple[Tensor, ...]]:
    raw = torch.where(logits.isnan(), -inf, logits) + 0.0  # [n, vocab]; zero has one sign
    peaks = raw.amax(dim=1)
    own = raw.gather(1, targets[:, None])  # [n, 1]
    rank = 1 + (raw > own).sum(dim=1)
    ids = _best(raw, min(max(num_top, 0), raw.shape[1]))  # [n, num_top]
    return to_host(targets, peaks, total_weights(raw, peaks), own[:, 0], rank, ids, raw.gather(1, ids))


def _read(*columns: Tensor) -> list[Logprobs]:
    found = []
    for target, peak, total, logit, place, top, values in zip(*(c.tolist() for c in columns), strict=True):
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
