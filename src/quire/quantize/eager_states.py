"""Linear attention over whole sequences, in numpy: `delta_rule`, `linear_attention` and `wkv7` of the op set."""

from collections.abc import Sequence

import numpy as np

from quire.ops.opset import Wkv7Weights
from quire.quantize.floats import Floats


def linear_attention(
    q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats | None, spans: Sequence[slice], key_dim: int,
    tiled: bool = False,
) -> Floats:  # fmt: skip
    """`beta`: of the delta rule; None: values are added as they are. `spans`: the rows of each sequence."""
    heads = q.shape[1] // key_dim if beta is None else beta.shape[1]
    q, k = (x.reshape(len(x), -1, key_dim) for x in (q, k))
    shared = heads // q.shape[1]
    q, k = (np.tile(x, (1, shared, 1)) if tiled else np.repeat(x, shared, axis=1) for x in (q, k))
    values, decays = v.reshape(len(v), heads, -1), decay.reshape(len(v), heads, -1, 1)
    out = np.empty_like(values)
    for span in spans:
        state = np.zeros((heads, key_dim, values.shape[2]), np.float32)
        for t in range(span.start, span.stop):
            state *= decays[t]
            added = values[t]
            if beta is not None:
                added = beta[t, :, None] * (added - np.einsum("hk,hkv->hv", k[t], state))
            state += k[t, :, :, None] * added[:, None, :]
            out[t] = np.einsum("hk,hkv->hv", q[t], state)
    return out.reshape(v.shape)


def wkv7(r: Floats, w: Floats, k: Floats, v: Floats, a: Floats, weights: Wkv7Weights, spans: Sequence[slice]) -> Floats:
    heads, size = weights.heads, r.shape[1] // weights.heads

    def by_head(x: Floats) -> Floats:
        return x.reshape(*x.shape[:-1], heads, size)

    decay = by_head(np.exp(-np.exp(np.float32(-0.5)) / (1 + np.exp(-w))))
    recall = by_head(k * weights.remove_scale)
    recall = recall / np.maximum(np.linalg.norm(recall, axis=-1, keepdims=True), np.float32(1e-12))
    key = by_head(k * (1 + (a - 1) * weights.learn_scale))
    queries, values, erase = by_head(r), by_head(v), recall * by_head(a)
    out = np.empty_like(values)
    for span in spans:
        state = np.zeros((heads, size, size), np.float32)
        for t in range(span.start, span.stop):
            recalled = np.einsum("hk,hkv->hv", recall[t], state)
            state = decay[t, :, :, None] * state + key[t, :, :, None] * values[t, :, None]
            state -= erase[t, :, :, None] * recalled[:, None]
            out[t] = np.einsum("hk,hkv->hv", queries[t], state)
    centred = out - out.mean(-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + weights.eps)
    bonus = (queries * key * by_head(weights.bonus)).sum(-1, keepdims=True) * values
    both: Floats = normed.reshape(r.shape) * weights.norm + weights.norm_bias + bonus.reshape(r.shape)
    return both
