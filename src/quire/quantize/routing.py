"""Which experts a token of an MoE layer goes to, and their shares: `Routing` (ops/opset.py) in numpy."""

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported
from quire.ops.opset import Routing
from quire.quantize.floats import Floats


def routed(logits: Floats, routing: Routing, correction: Floats | None) -> tuple[NDArray[np.intp], Floats]:
    """-> experts [tokens, top_k], the best first, and their weights."""
    if routing.sparsemixer_threshold:
        raise Unsupported("PhiMoE's routing cannot be calibrated", "choose a method without --calibrate")
    if routing.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        powers = np.exp(logits - logits.max(1, keepdims=True))
        scores = powers / powers.sum(1, keepdims=True)
    ranked: Floats = (scores if correction is None else scores + correction).astype(np.float32)
    if routing.num_groups > 1:
        ranked = np.where(_in_best_groups(ranked, routing), ranked, -np.inf)
    experts = np.argsort(-ranked, axis=1, kind="stable")[:, : routing.top_k]
    shares = np.take_along_axis(scores, experts, 1)
    if routing.renormalize:
        shares = shares / shares.sum(1, keepdims=True)
    return experts, (shares * routing.scale).astype(np.float32)


def _in_best_groups(ranked: Floats, routing: Routing) -> NDArray[np.bool_]:
    groups = ranked.reshape(len(ranked), routing.num_groups, -1)
    best = np.sort(groups, axis=2)[..., ::-1]
    judged = best[..., :2].sum(2) if routing.group_score == "best two" else best[..., 0]
    chosen = np.argsort(-judged, axis=1, kind="stable")[:, : routing.top_groups]
    inside = np.zeros(judged.shape, bool)
    np.put_along_axis(inside, chosen, True, axis=1)
    return np.repeat(inside, groups.shape[2], axis=1)
