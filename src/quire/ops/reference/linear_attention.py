"""Linear attention with a state: the gated delta rule, Kimi delta attention and lightning attention, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.reference.states import segments, state_in


def attend_states(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    slots: Tensor,
    states: Sequence[Sequence[int]],
    tiled: bool = False,
) -> Tensor:
    """slots [slots, heads, key_dim, value_dim]; see `OpSet.delta_rule`. Without `beta`: `OpSet.linear_attention`."""
    _, heads, key_dim, value_dim = slots.shape
    q, k = (x.unflatten(-1, (-1, key_dim)) for x in (q, k))
    shared = heads // q.shape[1]
    q, k = (x.repeat(1, shared, 1) if tiled else x.repeat_interleave(shared, 1) for x in (q, k))
    v, decay = v.unflatten(-1, (heads, value_dim)), decay.unflatten(-1, (heads, -1))
    out = torch.empty_like(v)
    for first, end, source, target in segments(states):
        state = state_in(slots, source)
        for t in range(first, end):
            out[t] = attend_token(q[t], k[t], v[t], decay[t], None if beta is None else beta[t], state)
        slots[target] = state
    return out.flatten(1)


def attend_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor) -> Tensor:
    """q and k [heads, key_dim], v [heads, value_dim], decay [heads, 1 or key_dim], beta [heads] -> [heads, value_dim].

    `state` [heads, key_dim, value_dim] is changed in place."""
    state *= decay[:, :, None]
    if beta is not None:
        v = beta[:, None] * (v - (k[:, :, None] * state).sum(1))
    state += k[:, :, None] * v[:, None]
    return (q[:, :, None] * state).sum(1)
