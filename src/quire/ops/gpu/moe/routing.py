# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Which experts a token goes to, one program a token. The twin is `quire.ops.reference.routing.choose_experts`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.opset import Routing
from quire.ops.reference.routing import LEAST_SUM

LEAST = tl.constexpr(LEAST_SUM)


def route(logits: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> ids [T, top_k] int32, the best one first, and weights [T, top_k] fp32."""
    num_tokens, num_experts = logits.shape
    routing.check(num_experts)
    assert logits.stride(1) == 1
    ids = torch.empty(num_tokens, routing.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, routing.top_k, dtype=torch.float32, device=logits.device)
    size = num_experts // routing.num_groups
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            correction,
            ids,
            weights,
            logits.stride(0),
            routing.scale,
            SIGMOID=routing.scoring == "sigmoid",
            RENORMALIZE=routing.renormalize,
            TOP_K=routing.top_k,
            GROUPS=routing.num_groups,
            TOP_GROUPS=routing.top_groups if routing.num_groups > 1 else 0,
            BEST_TWO=routing.group_score == "best two",
            NEAR=routing.near,
            SIZE=size,
            GROUPS_PAD=next_power_of_two(routing.num_groups),
            SIZE_PAD=next_power_of_two(size),
            num_warps=1 if num_experts <= 256 else 4,
        )
    return ids, weights


@triton.jit
def _route_kernel(
    logits,
    correction,
    ids,
    weights,
    stride,
    scale,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,  # 0: there is one group, and it is open
    BEST_TWO: tl.constexpr,
    NEAR: tl.constexpr,
    SIZE: tl.constexpr,  # experts of a group
    GROUPS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PAD)
    member = tl.arange(0, SIZE_PAD)
    there = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]  # [GROUPS_PAD, SIZE_PAD]
    x = tl.load(logits + token * stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if NEAR > 0:
        scores = x
    elif SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(x))
        scores = scores / tl.sum(scores)
    merits = scores
    if correction is not None and NEAR == 0:
        merits += tl.load(correction + expert, mask=there, other=0.0)
    merits = tl.where(there & (merits == merits), merits, float("-inf"))

    if TOP_GROUPS > 0:
        group_merits = tl.max(merits, axis=1)
        if BEST_TWO:
            first = tl.min(tl.where(merits == group_merits[:, None], member[None, :], SIZE_PAD), axis=1)
            others = tl.where(member[None, :] == first[:, None], float("-inf"), merits)
            group_merits += tl.max(others, axis=1)
        opened = tl.zeros((GROUPS_PAD,), tl.int32)
        for _ in range(TOP_GROUPS):
            closed = (opened == 0) & (group < GROUPS)
            most = tl.max(tl.where(closed, group_merits, float("-inf")))
            opened = tl.where(group == tl.min(tl.where(closed & (group_merits == most), group, GROUPS)), 1, opened)
        merits = tl.where((opened > 0)[:, None], merits, float("-inf"))

    chosen = tl.zeros((GROUPS_PAD, SIZE_PAD), tl.int32)  # 1 + the place among the chosen
    total = 0.0
    for place in range(TOP_K):
        left = there & (chosen == 0)
        most = tl.max(tl.where(left, merits, float("-inf")))
        best = tl.min(tl.where(left & (merits == most), expert, GROUPS * SIZE))
        chosen = tl.where(expert == best, place + 1, chosen)
        if NEAR > 0:
            near = left & (most - x <= NEAR * tl.maximum(tl.abs(x), most))
            share = 1 / tl.sum(tl.where(near | (expert == best), tl.exp(x - most), 0.0))
            tl.store(weights + token * TOP_K + place, share * scale)
        total += tl.sum(tl.where(expert == best, scores, 0.0))
        tl.store(ids + token * TOP_K + place, best)
    if NEAR == 0:
        factor = scale
        if RENORMALIZE:
            factor = scale / (total + LEAST)
        tl.store(weights + token * TOP_K + chosen - 1, scores * factor, mask=there & (chosen > 0))
