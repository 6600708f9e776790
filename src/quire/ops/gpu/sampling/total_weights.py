# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The total softmax weight of lines at a temperature of one, for logprobs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.sampling.softmax_weights import FLOAT_MAX, softmax_weight

TILE = 4096


def total_weights(logits: Tensor, maxima: Tensor) -> Tensor:
    """logits [n, vocab] fp32 without NaN, maxima [n] their greatest -> [n] int64. Meaningless where a maximum is
    -inf."""
    lines, vocab = logits.shape
    totals = torch.zeros(lines, dtype=torch.int64, device=logits.device)
    tile = min(TILE, triton.next_power_of_2(vocab))
    _total_weights[(triton.cdiv(vocab, tile), lines)](
        logits, logits.stride(0), maxima, totals, vocab, TILE=tile, num_warps=8, enable_fp_fusion=False
    )
    return totals


@triton.jit
def _total_weights(logits, stride, maxima, totals, vocab, TILE: tl.constexpr):
    tile, line = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + line.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
    max_logit = tl.clamp(tl.load(maxima + line), -FLOAT_MAX, FLOAT_MAX)
    weight = softmax_weight(x, max_logit, tl.full((), 1.0, tl.float64))
    tl.atomic_add(totals + line, tl.sum(weight, axis=0), sem="relaxed")
