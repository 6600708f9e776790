"""Logprobs of lines on the device: computed there, in batches, and copied to the host without waiting.

Specification: `_raw_logprobs` in ops/reference/sampler.py"""

from collections.abc import Callable, Sequence
from math import inf, log

import torch
from torch import Tensor

from quire.ops.gpu.sampling.total_weights import total_weights
from quire.ops.reference.filters import FLOAT_MAX, MAX_WEIGHT
from quire.ops.sampled_row import Logprobs

LINES_AT_ONCE = 64  # temporaries are a few fp32 and int64 copies of so many lines


def to_host(*tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """Begin to copy tensors from the device; the result waits for them."""
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
    """Of the given lines of logits [R, vocab]: (id, logprob, rank) of the line's target in targets [R], then of the
    `num_top` most likely tokens. The result waits for them. A target below 0 counts as 0."""
    parts = []
    for start in range(0, len(lines), LINES_AT_ONCE):
        chunk = torch.tensor(lines[start : start + LINES_AT_ONCE]).to(logits.device, non_blocking=True)
        parts.append(_start_lines(logits[chunk].float(), targets[chunk].long().clamp(min=0), num_top))
    return lambda: [line for part in parts for line in _read(*part())]


def _start_lines(logits: Tensor, targets: Tensor, num_top: int) -> Callable[[], tuple[Tensor, ...]]:
    raw = torch.where(logits.isnan(), -inf, logits) + 0.0  # [n, vocab]; both zeros compare equal
    maxima = raw.amax(dim=1)
    own = raw.gather(1, targets[:, None])  # [n, 1]
    rank = 1 + (raw > own).sum(dim=1)
    ids = _best(raw, min(max(num_top, 0), raw.shape[1]))  # [n, num_top]
    return to_host(targets, maxima, total_weights(raw, maxima), own[:, 0], rank, ids, raw.gather(1, ids))


def _read(*columns: Tensor) -> list[Logprobs]:
    logprobs = []
    for target, max_logit, total, logit, rank, top, values in zip(*(c.tolist() for c in columns), strict=True):
        if max_logit == -inf:
            logprobs.append([(target, -inf, 1)])
            continue
        greatest, log_total = min(max_logit, FLOAT_MAX), log(total / MAX_WEIGHT)
        line = [(target, min(logit - greatest, 0.0) - log_total, rank)]
        for count, (id, value) in enumerate(zip(top, values, strict=True)):
            if value == -inf:
                break
            tied = count > 0 and value == values[count - 1]
            line.append((id, min(value - greatest, 0.0) - log_total, line[-1][2] if tied else 1 + count))
        logprobs.append(line)
    return logprobs


def _best(raw: Tensor, count: int) -> Tensor:
    """Ids [n, count] of the greatest logits, ties by id: (logit, id) packed into an integer that compares alike."""
    bits = raw.view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[1], device=raw.device)
    pairs = (keys << 32) | (0x7FFFFFFF - ids)
    return 0x7FFFFFFF - (pairs.topk(count, dim=1).values & 0x7FFFFFFF)
