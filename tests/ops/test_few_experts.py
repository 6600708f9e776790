"""Quantized experts for few tokens: on a Hopper GPU, the kernel beside its plain definition; anywhere, which weights it
takes."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.gemms import DEVICE, integers, randn
from ops.quantized_cases import CASES, stored_case
from ops.test_triton_experts import plain_moe, rows_of
from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.gpu.moe.few_formats import few_format
from quire.ops.gpu.moe.moe import moe_mlp
from quire.ops.gpu.moe.quantized import QuantizedExperts, stack_experts
from quire.ops.gpu.moe.quantized_few import FewRoutesConfig, can_few, few_configs, few_gemm, few_mlp
from quire.ops.gpu.moe.sorting import sort_by_expert
from quire.ops.opset import Activation

pytestmark = pytest.mark.slow
HOPPER = torch.cuda.is_available() and has_wide_kernel(torch.device("cuda", 0))
TRANSLATED = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0"  # compile_only.py
needs_hopper = pytest.mark.skipif(not (HOPPER or TRANSLATED), reason="the kernel is for Hopper GPUs")
BF16, E = torch.bfloat16, 3
FEW_CASES: dict[str, Callable[[], Any]] = {
    **CASES,
    "AWQ": lambda: stored_case("Q4_Z", K=768),
    "IQ4_NL": lambda: stored_case("IQ4_NL", K=768),
}


def three_experts(name: str) -> tuple[QuantizedExperts, Tensor]:
    """The rows of a case, each time in another order -> and [experts, rows, inputs] in fp32"""
    weight, plain = FEW_CASES[name]()
    orders = [torch.randperm(len(plain), generator=torch.Generator().manual_seed(i)) for i in range(E)]
    experts = stack_experts([replace(weight, **rows_of(weight, order.to(DEVICE))) for order in orders], E)
    return experts, torch.stack([plain[order.to(DEVICE)] for order in orders]).float()


@needs_hopper
@pytest.mark.parametrize(
    "T,config", [(1, FewRoutesConfig(8, 1, 2, 4)), (9, FewRoutesConfig(8, 2, 2, 2)), (30, FewRoutesConfig(16, 4, 1))]
)
@pytest.mark.parametrize("name", FEW_CASES)
def test_every_format(name: str, T: int, config: FewRoutesConfig) -> None:
    """35 gate and up rows, then 70 down rows: neither fills its last program. Some routes are elsewhere."""
    experts, plain = three_experts(name)
    K, k, splits = plain.shape[2], 2, min(T, 2)
    x, weights = (randn(T, K) * 0.1).to(BF16), randn(T, k, seed=4).softmax(-1)
    ids, biases = integers(-1, E + 1, T, k, seed=T).int(), randn(E, 70, seed=5)
    ids[0, 0] = 1
    routes, tiles = None, ids.flatten()
    if T > 1:
        routes, tiles, _, _ = sort_by_expert(ids, E, config.columns)
    hidden = torch.full((T * k, 35), torch.nan, dtype=BF16, device=DEVICE)
    few_gemm(x, experts, biases, weights, hidden, routes, tiles, T * k, k, 0, config)
    parts = torch.full((splits, T * k, 70), torch.nan, device=DEVICE)
    every, config = x.repeat_interleave(k, dim=0), config._replace(splits=splits)
    few_gemm(every, experts, biases, weights, parts, routes, tiles, T * k, 1, -1, config)

    here, there = (ids >= 0) & (ids < E), ids.clamp(0, E - 1).long()
    truth = torch.einsum("tk,tjnk->tjn", x.float(), plain[there]) + biases[there]
    error = (parts.sum(0).view(T, k, 70) - truth * weights[..., None])[here].norm()
    assert error <= torch.finfo(BF16).eps * (truth * weights[..., None])[here].norm()
    truth = torch.nn.functional.silu(truth[..., :35]) * truth[..., 35:]
    error = (hidden.view(T, k, 35).float() - truth)[here].norm()
    assert error <= 4 * torch.finfo(BF16).eps * truth[here].norm()


@needs_hopper
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("T", [1, 4, 11])
def test_mixtures(T: int, overlap: bool) -> None:
    """Gate and up in Q4_K, down in Q6_K, as llama.cpp mixes them; then both in MXFP4, of which the first has an odd
    number of chunks."""
    for up_type, down_type, H, inner in (("Q4_K", "Q6_K", 512, 256), ("MXFP4", "MXFP4", 352, 96)):
        gates, plain_gates = stored_rows_of(up_type, 2 * inner, H)
        downs, plain_downs = stored_rows_of(down_type, H, inner)
        x, ids = (randn(T, H) * 0.1).to(BF16), integers(-1, E + 1, T, 2, seed=T).int()
        weights, biases = randn(T, 2, seed=4).softmax(-1), (randn(E, 2 * inner, seed=5), randn(E, H, seed=6))
        ids[0, 0] = 1
        assert can_few(x, gates, downs, T * 2) is HOPPER
        given = x, ids, weights, gates, downs, Activation.SILU, *biases, 0.7
        out = few_mlp(*given, overlap)
        truth = plain_moe(x, ids, weights, plain_gates, plain_downs, 0.7, biases)
        assert (out.float() - truth).norm() <= 4 * torch.finfo(BF16).eps * truth.norm()
        if HOPPER:
            same = moe_mlp(*given[:-1], limit=0.7, overlap=overlap)
            assert torch.equal(same, out)


def stored_rows_of(name: str, rows: int, columns: int) -> tuple[QuantizedExperts, Tensor]:
    """Three experts, whose rows repeat those of a case."""
    weight, plain = stored_case(name, columns)
    orders = [integers(0, len(plain), rows, seed=i) for i in range(E)]
    experts = stack_experts([replace(weight, **rows_of(weight, order)) for order in orders], E)
    return experts, torch.stack([plain[order] for order in orders]).float()


def test_how_scales_of_mxfp4_are_stored() -> None:
    kinds = {"MXFP4 as stored": "exponents", "MXFP4 in chunks of 256": "exponents", "MXFP4": "floats"}
    for name, kind in kinds.items():  # the last one has another codebook
        form = few_format(CASES[name]()[0])
        assert form is not None and form.kind == kind


def test_a_cpu_and_many_routes_are_not_for_it() -> None:
    experts, _ = three_experts("Q4_K")
    x = randn(4, 512).to(BF16)
    assert can_few(x, experts, experts, 4) is HOPPER
    assert not can_few(x, experts, experts, 1000) and not can_few(x, x, experts, 4)
    for num_routes, columns, parts in ((1, 8, 4), (18, 8, 1), (24, 16, 1)):
        first, second = few_configs(experts, experts, num_routes)
        assert first.columns == second.columns == columns and first.splits == 1 and first.parts == parts
