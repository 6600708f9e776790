"""Linear attention with a state: the gated delta rule, Kimi delta attention and lightning attention, token by token."""

import torch
from torch import Tensor


def attend_states(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor) -> Tensor:
    """The tokens of one sequence -> [n, heads, value_dim]. `state` [heads, key_dim, value_dim] is changed in place.

    q and k [n, key_heads, key_dim], v [n, heads, value_dim]; decay [n, heads, 1], or of each row of the state [n,
    heads, key_dim]; beta [n, heads], or None: values are added as they are."""
    heads, out = v.shape[1], torch.empty_like(v)
    q, k = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (q, k))
    for t in range(len(v)):
        state *= decay[t, :, :, None]
        added = v[t]
        if beta is not None:
            added = beta[t, :, None] * (added - (k[t, :, :, None] * state).sum(1))
        state += k[t, :, :, None] * added[:, None]
        out[t] = (q[t, :, :, None] * state).sum(1)
    return out
