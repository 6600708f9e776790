"""Top-k routing in plain torch: the formulas of `Routing`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.opset import Routing

MIN_WEIGHT_SUM = 1e-20  # where all sigmoids are 0: their weights stay 0

SCORES = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrt softplus": lambda logits: F.softplus(logits).sqrt(),
}


def choose_experts(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> the chosen experts' ids [T, top_k], the best one first, and their weights in fp32."""
    routing.check(logits.shape[1])
    logits = logits.float()
    if routing.sparsemixer_threshold:
        return _sparsemixer(logits, routing)
    scores = SCORES[routing.scoring](logits)
    selection = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        selection = _mask_groups(selection, routing)
    ids = _top(selection, routing.top_k) if chosen is None else chosen.long()
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + MIN_WEIGHT_SUM)
    return ids, weights * routing.scale


def _sparsemixer(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    ids, weights, left = [], [], logits
    for _ in range(routing.top_k):
        best = _top(left, 1)
        top = left.gather(1, best)
        far = top - logits > routing.sparsemixer_threshold * logits.abs().clamp(min=top)
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(1, best))
        ids.append(best)
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1) * routing.scale


def _mask_groups(selection: Tensor, routing: Routing) -> Tensor:
    """selection scores [T, experts], with -inf for experts outside the best groups"""
    groups = selection.unflatten(1, (routing.num_groups, -1))  # [T, groups, experts of a group]
    count = 2 if routing.group_score == "best two" else 1
    group_scores = groups.topk(count, dim=-1).values.sum(dim=-1)
    best = _top(group_scores, routing.top_groups)
    closed = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
    return groups.masked_fill(closed[..., None], float("-inf")).flatten(1)


def _top(values: Tensor, count: int) -> Tensor:
    """The indices of the greatest values of each row, in descending order, ties to the lower index: [T, count]"""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
