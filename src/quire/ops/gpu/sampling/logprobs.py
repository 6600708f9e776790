"""Logprobs of lines on the device: computed there, in batches, and copied to the host without waiting.

Specification: `_raw_logprobs` in ops/reference/sampler.py"""

from collections.abc import Callable, Mapping, Sequence
from math import inf, log

import torch
from torch import Tensor

from quire.ops.gpu.sampling.total_weights import total_weights
from quire.ops.reference.filters import FLOAT_MAX, MAX_WEIGHT
from quire.ops.sampled_row import Logprobs

LINES_AT_ONCE = 64  # temporaries are a few fp32 and int64 copies of so many lines
Wanted = tuple[int, Sequence[int]]  # of a line: how many of the most likely tokens, and which others


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


def begin_logprobs(logits: Tensor, wanted: Mapping[int, Wanted], targets: Tensor) -> Callable[[], list[Logprobs]]:
    """Of the wanted lines of logits [R, vocab]: (id, logprob, rank) of the line's target in targets [R], then of its
    most likely tokens, then of its listed ones. The result waits for them. A target below 0 counts as 0."""
    parts, lines = [], list(wanted.items())
    for start in range(0, len(lines), LINES_AT_ONCE):
        part = dict(lines[start : start + LINES_AT_ONCE])
        chunk = torch.tensor(list(part)).to(logits.device, non_blocking=True)
        arrive = _start_lines(logits[chunk].float(), targets[chunk].long().clamp(min=0), list(part.values()))
        parts.append((arrive, list(part.values())))
    return lambda: [line for arrive, of_lines in parts for line in _read(of_lines, *arrive())]


def _start_lines(logits: Tensor, targets: Tensor, wanted: Sequence[Wanted]) -> Callable[[], tuple[Tensor, ...]]:
    raw = torch.where(logits.isnan(), -inf, logits) + 0.0  # [n, vocab]; both zeros compare equal
    maxima = raw.amax(dim=1)
    num_listed = max(len(listed) for _, listed in wanted)
    padded = torch.tensor([[*listed, *[0] * (num_listed - len(listed))] for _, listed in wanted], dtype=torch.int64)
    described = torch.cat([targets[:, None], padded.to(raw.device, non_blocking=True)], dim=1)  # [n, 1 + num_listed]
    own = raw.gather(1, described)
    ranks = torch.stack([1 + (raw > column[:, None]).sum(dim=1) for column in own.unbind(1)], dim=1)
    num_top = max(count for count, _ in wanted)
    ids = _best(raw, min(max(num_top, 0), raw.shape[1]))  # [n, num_top]
    return to_host(maxima, total_weights(raw, maxima), described, own, ranks, ids, raw.gather(1, ids))


def _read(wanted: Sequence[Wanted], *columns: Tensor) -> list[Logprobs]:
    logprobs: list[Logprobs] = []
    for of_line, line in zip(wanted, zip(*(c.tolist() for c in columns), strict=True), strict=True):
        max_logit, total, described, logits, ranks, top, values = line
        num_top, listed = of_line
        if max_logit == -inf:
            logprobs.append([(described[0], -inf, 1)])
            continue
        greatest, log_total = min(max_logit, FLOAT_MAX), log(total / MAX_WEIGHT)

        def logprob(logit: float, greatest: float = greatest, log_total: float = log_total) -> float:
            return min(logit - greatest, 0.0) - log_total

        own, *others = list(zip(described, map(logprob, logits), ranks, strict=True))[: 1 + len(listed)]
        entries = [own]
        for count, (id, value) in enumerate(zip(top[:num_top], values, strict=False)):
            if value == -inf:
                break
            tied = count > 0 and value == values[count - 1]
            entries.append((id, logprob(value), entries[-1][2] if tied else 1 + count))
        logprobs.append(entries + others)
    return logprobs


def _best(raw: Tensor, count: int) -> Tensor:
    """Ids [n, count] of the greatest logits, ties by id: (logit, id) packed into an integer that compares alike."""
    bits = raw.view(torch.int32)
    keys = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    ids = torch.arange(raw.shape[1], device=raw.device)
    pairs = (keys << 32) | (0x7FFFFFFF - ids)
    return 0x7FFFFFFF - (pairs.topk(count, dim=1).values & 0x7FFFFFFF)
