"""The recurrences of Mamba and Mamba 2 over whole sequences, in numpy. `OpSet` describes them."""

from collections.abc import Sequence

import numpy as np

from quire.ops.opset import Mamba2Weights, MambaWeights
from quire.quantize.floats import Floats


def mamba2_scan(x: Floats, dt: Floats, b: Floats, c: Floats, w: Mamba2Weights, spans: Sequence[slice]) -> Floats:
    heads, groups = dt.shape[1], w.groups
    head_dim, columns = x.shape[1] // heads, b.shape[1] // groups
    x = x.reshape(len(x), heads, head_dim)
    b, c = (v.reshape(len(x), groups, columns).repeat(heads // groups, axis=1) for v in (b, c))
    delta = np.clip(np.logaddexp(dt + w.dt_bias, 0, dtype=np.float32), *w.dt_limit)
    decay = np.exp(w.a * delta)
    out = np.empty_like(x)
    for span in spans:
        state = np.zeros((heads, columns, head_dim), np.float32)
        for t in range(span.start, span.stop):
            state *= decay[t][:, None, None]
            state += (delta[t][:, None] * b[t])[:, :, None] * x[t][:, None, :]
            out[t] = np.einsum("hn,hnp->hp", c[t], state) + w.skip[:, None] * x[t]
    flat: Floats = out.reshape(len(x), heads * head_dim)
    return flat


def mamba_scan(x: Floats, dt: Floats, b: Floats, c: Floats, w: MambaWeights, spans: Sequence[slice]) -> Floats:
    delta = np.logaddexp(dt, 0, dtype=np.float32)
    out = np.empty_like(x)
    for span in spans:
        state = np.zeros(w.a.shape, np.float32)
        for t in range(span.start, span.stop):
            state = np.exp(w.a * delta[t]) * state + np.outer(b[t], delta[t] * x[t])
            out[t] = c[t] @ state + w.skip * x[t]
    return out
