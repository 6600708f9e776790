# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Top-k routing: which experts a token goes to, one program a token. Specification: ops/reference/routing.py"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import next_power_of_two
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs
from quire.ops.opset import Routing
from quire.ops.reference.routing import MIN_WEIGHT_SUM  # a number of the specification

MIN_SUM = tl.constexpr(MIN_WEIGHT_SUM)


def route(
    logits: Tensor, routing: Routing, correction: Tensor | None = None, overlap: bool = False
) -> tuple[Tensor, Tensor]:
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
            NEAR=routing.sparsemixer_threshold,
            SIZE=size,
            GROUPS_PAD=next_power_of_two(routing.num_groups),
            SIZE_PAD=next_power_of_two(size),
            OVERLAP=overlap,
            num_warps=1 if num_experts <= 256 else 4,
            **overlap_options(overlap),
        )
    return ids, weights


@triton.jit
def _route_kernel(
    logits,
    correction,
    ids,
    weights,
    logit_stride,
    scale,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,  # 0: there is one group
    BEST_TWO: tl.constexpr,
    NEAR: tl.constexpr,
    SIZE: tl.constexpr,  # experts of a group
    GROUPS_PAD: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_PAD)
    member = tl.arange(0, SIZE_PAD)
    there = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    expert = group[:, None] * SIZE + member[None, :]  # [GROUPS_PAD, SIZE_PAD]
    x = tl.load(logits + token * logit_stride + expert, mask=there, other=float("-inf")).to(tl.float32)
    if NEAR > 0:
        scores = x
    elif SIGMOID:
        scores = tl.sigmoid(x)
    else:
        scores = tl.exp(x - tl.max(x))
        scores = scores / tl.sum(scores)
    selection = scores
    if correction is not None and NEAR == 0:
        selection += tl.load(correction + expert, mask=there, other=0.0)
    selection = tl.where(there & (selection == selection), selection, float("-inf"))

    if TOP_GROUPS > 0:
        group_scores = tl.max(selection, axis=1)
        if BEST_TWO:
            first = tl.min(tl.where(selection == group_scores[:, None], member[None, :], SIZE_PAD), axis=1)
            others = tl.where(member[None, :] == first[:, None], float("-inf"), selection)
            group_scores += tl.max(others, axis=1)
        opened = tl.zeros((GROUPS_PAD,), tl.int32)
        for _ in range(TOP_GROUPS):
            closed = (opened == 0) & (group < GROUPS)
            best_score = tl.max(tl.where(closed, group_scores, float("-inf")))
            opened = tl.where(
                group == tl.min(tl.where(closed & (group_scores == best_score), group, GROUPS)), 1, opened
            )
        selection = tl.where((opened > 0)[:, None], selection, float("-inf"))

    # Integers in the order of the selection: a warp finds the greatest integer in one instruction. -0.0 is 0.0.
    bits = tl.where(selection == 0.0, 0.0, selection).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    chosen = tl.zeros((GROUPS_PAD, SIZE_PAD), tl.int32)  # 1 + rank of a chosen expert
    for rank in range(TOP_K):
        left = there & (chosen == 0)
        greatest = tl.max(tl.where(left, order, -0x7FFFFFFF - 1))
        best = tl.min(tl.where(left & (order == greatest), expert, GROUPS * SIZE))
        if NEAR > 0:
            best_score = tl.max(tl.where(expert == best, selection, float("-inf")))
            near = left & (best_score - x <= NEAR * tl.maximum(tl.abs(x), best_score))
            share = 1 / tl.sum(tl.where(near | (expert == best), tl.exp(x - best_score), 0.0))
            tl.store(weights + token * TOP_K + rank, share * scale)
        chosen = tl.where(expert == best, rank + 1, chosen)
        tl.store(ids + token * TOP_K + rank, best)
    if NEAR == 0:
        weight_scale = scale
        if RENORMALIZE:
            weight_scale = scale / (tl.sum(tl.where(chosen > 0, scores, 0.0)) + MIN_SUM)
        tl.store(weights + token * TOP_K + chosen - 1, scores * weight_scale, mask=there & (chosen > 0))
