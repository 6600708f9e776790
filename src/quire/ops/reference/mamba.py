"""The recurrences of Mamba and Mamba 2, token by token.

Exponentials are taken for one token at a time: how torch divides a larger tensor into vectors would change bits."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.opset import Mamba2Weights, MambaWeights
from quire.ops.reference.states import segments, state_in


def mamba2_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, w: Mamba2Weights, slots: Tensor, states: Sequence[Sequence[int]]
) -> Tensor:
    """slots [slots, heads, columns, head_dim]; see `OpSet.mamba2_scan`"""
    _, heads, columns, head_dim = slots.shape
    x = x.unflatten(-1, (heads, head_dim))
    b, c = (v.unflatten(-1, (w.groups, columns)).repeat_interleave(heads // w.groups, 1) for v in (b, c))
    out = torch.empty_like(x)
    for first, end, source, target in segments(states):
        state = state_in(slots, source)
        for t in range(first, end):
            delta = F.softplus(dt[t] + w.dt_bias).clamp(*w.dt_limit)  # [heads]
            gained = (delta[:, None] * b[t])[:, :, None] * x[t, :, None, :]
            state = torch.exp(w.a * delta)[:, None, None] * state + gained
            out[t] = (c[t][:, :, None] * state).sum(1) + w.skip[:, None] * x[t]
        slots[target] = state
    return out.flatten(1)


def mamba_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, w: MambaWeights, slots: Tensor, states: Sequence[Sequence[int]]
) -> Tensor:
    """slots [slots, columns, channels]; see `OpSet.mamba_scan`"""
    out = torch.empty_like(x)
    for first, end, source, target in segments(states):
        state = state_in(slots, source)
        for t in range(first, end):
            delta = F.softplus(dt[t])
            state = torch.exp(w.a * delta) * state + b[t][:, None] * (delta * x[t])
            out[t] = (c[t][:, None] * state).sum(0) + w.skip * x[t]
        slots[target] = state
    return out
