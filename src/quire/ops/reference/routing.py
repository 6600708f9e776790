"""Which experts a token goes to, and with which weights: the formulas of `Routing`."""

import torch
from torch import Tensor

from quire.ops.opset import Routing

MIN_WEIGHT_SUM = 1e-20  # of sigmoids that all are 0: what is divided by it stays 0


def choose_experts(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> the chosen experts' ids [T, top_k], the best one first, and their weights in fp32."""
    routing.check(logits.shape[1])
    logits = logits.float()
    if routing.near:
        return _near_ones(logits, routing)
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
    merits = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        merits = _in_the_best_groups(merits, routing)
    ids = _best(merits, routing.top_k)
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + MIN_WEIGHT_SUM)
    return ids, weights * routing.scale


def _near_ones(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    ids, weights, left = [], [], logits
    for _ in range(routing.top_k):
        best = _best(left, 1)
        most = left.gather(1, best)
        far = most - logits > routing.near * logits.abs().clamp(min=most)
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(1, best))
        ids.append(best)
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1) * routing.scale


def _in_the_best_groups(merits: Tensor, routing: Routing) -> Tensor:
    """merits [T, experts], with -inf for experts that cannot be chosen"""
    groups = merits.unflatten(1, (routing.num_groups, -1))  # [T, groups, experts of a group]
    count = 2 if routing.group_score == "best two" else 1
    group_merits = groups.topk(count, dim=-1).values.sum(dim=-1)
    best = _best(group_merits, routing.top_groups)
    closed = torch.ones_like(group_merits, dtype=torch.bool).scatter(1, best, False)
    return groups.masked_fill(closed[..., None], float("-inf")).flatten(1)


def _best(values: Tensor, count: int) -> Tensor:
    """The places of the greatest values of each row, in falling order, ties in the order of places: [T, count]"""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
