"""The time mixing of RWKV 7, token by token."""

from collections.abc import Sequence
from math import exp

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.opset import Wkv7Weights
from quire.ops.reference.states import segments, state_in

FASTEST_DECAY = exp(-0.5)
MIN_LENGTH = 1e-12  # of a key that is normed


def wkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, weights: Wkv7Weights, slots: Tensor,
    states: Sequence[Sequence[int]],
) -> Tensor:  # fmt: skip
    """slots [slots, heads, n, n]; see `OpSet.wkv7`."""
    heads = weights.heads

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1))

    decay = by_head(torch.exp(-FASTEST_DECAY * torch.sigmoid(w.double())).to(w.dtype))
    recall = F.normalize(by_head(k * weights.remove_scale), dim=-1, eps=MIN_LENGTH)
    key = by_head(k * (1 + (a - 1) * weights.learn_scale))
    r, v, a = by_head(r), by_head(v), by_head(a)
    out = torch.empty_like(v)
    for first, end, source, target in segments(states):
        state = state_in(slots, source)
        for t in range(first, end):
            recalled = (recall[t][:, :, None] * state).sum(1)
            erased = (recall[t] * a[t])[:, :, None] * recalled[:, None]
            state = decay[t][:, :, None] * state + key[t][:, :, None] * v[t][:, None] - erased
            out[t] = (r[t][:, :, None] * state).sum(1)
        slots[target] = state
    normed = F.layer_norm(out, out.shape[-1:], eps=weights.eps).flatten(1) * weights.norm + weights.norm_bias
    bonus = (r * key * by_head(weights.bonus)).sum(-1, keepdim=True) * v
    return normed + bonus.flatten(1)
