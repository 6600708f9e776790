"""Linear attention over whole sequences, in numpy: `delta_rule` and `linear_attention` of the op set."""

from collections.abc import Sequence

import numpy as np

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
