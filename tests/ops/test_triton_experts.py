"""Mixtures of experts in Triton: interpreted where there is no GPU, else compiled."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.gemms import DEVICE, HALF, integers, randn
from ops.quantized_cases import CASES, plain, scaled_case
from quire.ops.gpu.linear.e2m1 import E2M1, take_rows
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.linear.scaled import ScaledWeight
from quire.ops.gpu.moe import sorting
from quire.ops.gpu.moe.gathering import gather_routes
from quire.ops.gpu.moe.moe import moe_mlp, stack_scaled
from quire.ops.gpu.moe.quantized import stack_experts
from quire.ops.gpu.moe.sorting import sort_by_expert
from quire.ops.opset import Activation

pytestmark = pytest.mark.slow


def plain_moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    limit: float = torch.inf,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Token by token, route by route."""
    out = torch.zeros(x.shape, device=x.device)
    up_biases, down_biases = biases or (torch.zeros(gate_up.shape[:2]), torch.zeros(down.shape[:2]))
    for t, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(ids.shape[1])).tolist():
        if 0 <= (expert := int(ids[t, j])) < len(gate_up):
            gate, up = (gate_up[expert].float() @ x[t].float() + up_biases[expert].to(x.device)).chunk(2)
            hidden = torch.nn.functional.silu(gate).clamp(-limit, limit) * up.clamp(-limit, limit)
            out[t] += weights[t, j] * (down[expert].float() @ hidden + down_biases[expert].to(x.device))
    return out


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("T,k,E", [(1, 2, 8), (5, 3, 4), (20, 2, 3), (70, 2, 2), (170, 2, 2)])
def test_moe(T: int, k: int, E: int, batch_invariant: bool) -> None:
    """Few routes by GEMV, some in small tiles, many in large ones, of which the last have fewer rows."""
    H, intermediate = 72, 40
    x = randn(T, H).to(HALF)
    gate_up, down = randn(E, 2 * intermediate, H, seed=1).to(HALF), randn(E, H, intermediate, seed=2).to(HALF)
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:k] for t in range(T)])
    ids, weights = ids.to(DEVICE, torch.int32), randn(T, k, seed=3).softmax(-1)
    if T > 1:
        ids[0, 0], ids[-1, 1] = -1, E  # experts that live elsewhere
    mlp = partial(moe_mlp, batch_invariant=batch_invariant)
    truth = plain_moe(x, ids, weights, gate_up, down)
    out = mlp(x, ids, weights, gate_up, down)
    assert (out.float() - truth).norm() <= 4 * torch.finfo(HALF).eps * truth.norm()
    if T > 1 and batch_invariant and DEVICE == "cuda":
        assert torch.equal(mlp(x[1:2], ids[1:2], weights[1:2], gate_up, down), out[1:2])
    biases = randn(E, 2 * intermediate, seed=4), randn(E, H, seed=5)
    clamped = mlp(x, ids, weights, gate_up, down, Activation.SILU, *biases, limit=0.7)
    truth = plain_moe(x, ids, weights, gate_up, down, 0.7, biases)
    assert (clamped.float() - truth).norm() <= 4 * torch.finfo(HALF).eps * truth.norm()


@pytest.mark.parametrize("k,E,H,inner", [(1, 3, 600, 24), (3, 5, 40, 300), (8, 16, 136, 392)])
def test_a_token_alone(k: int, E: int, H: int, inner: int) -> None:
    """Its inputs, and its hidden numbers, in several steps, the last of which is not whole; experts are elsewhere."""
    x, gate_up = randn(1, H).to(HALF), randn(E, 2 * inner, H, seed=1).to(HALF)
    down, weights = randn(E, H, inner, seed=2).to(HALF), randn(1, k, seed=3).softmax(-1)
    biases = randn(E, 2 * inner, seed=4), randn(E, H, seed=5)
    ids = torch.randperm(E, generator=torch.Generator().manual_seed(0))[None, :k].to(DEVICE, torch.int32)
    for elsewhere in ([], [-1, E]) if k > 1 else ([],):
        ids[0, 1 : 1 + len(elsewhere)] = torch.tensor(elsewhere)
        out = moe_mlp(x, ids, weights, gate_up, down, Activation.SILU, *biases, limit=0.7)
        truth = plain_moe(x, ids, weights, gate_up, down, 0.7, biases)
        assert (out.float() - truth).norm() <= 4 * torch.finfo(HALF).eps * truth.norm()


@pytest.mark.parametrize("name,T", [(name, (1, 30)[number % 2]) for number, name in enumerate(CASES)])
def test_mixtures_of_codes(name: str, T: int) -> None:
    """The rows of three experts are those of the case, each time in another order."""
    weight, plain = CASES[name]()
    inner, K = len(plain) // 2, plain.shape[1]
    orders = [torch.randperm(len(plain), generator=torch.Generator().manual_seed(i))[: 2 * inner] for i in range(3)]
    gate_up = stack_experts([replace(weight, **rows_of(weight, order.to(DEVICE))) for order in orders], 3)
    floats, down = torch.stack([plain[order.to(DEVICE)] for order in orders]), randn(3, K, inner, seed=3).to(HALF)
    x, ids, weights = (randn(T, K) * 0.01).to(HALF), integers(0, 3, T, 2).int(), randn(T, 2, seed=4).softmax(-1)
    truth = plain_moe(x, ids, weights, floats, down)
    out = moe_mlp(x, ids, weights, gate_up, down)
    assert (out.float() - truth).norm() <= 8 * torch.finfo(HALF).eps * truth.norm()
    limit = 0.5 * float(truth.abs().max())
    clamped = moe_mlp(x, ids, weights, gate_up, down, limit=limit)
    truth = plain_moe(x, ids, weights, floats, down, limit=limit)
    assert (clamped.float() - truth).norm() <= 8 * torch.finfo(HALF).eps * truth.norm()


@pytest.mark.parametrize("T", [1, 30])
@pytest.mark.parametrize("by_blocks", [False, True])
def test_mixtures_of_fp8(by_blocks: bool, T: int) -> None:
    """Three experts; what they are multiplied with is rounded to fp8 twice, here as well."""
    (E, H, inner), fp8 = (3, 256, 128) if by_blocks else (3, 144, 40), torch.float8_e4m3fn
    group = 128 if by_blocks else 0
    gates = [scaled_case(1, rows, H, fp8, by_blocks)[1] for rows in (inner, inner) * E]
    gates = [replace(w, scales=w.scales * (1 + i) / 50) for i, w in enumerate(gates)]
    downs = [scaled_case(1, H, inner, fp8, by_blocks)[1]] * E
    x, ids, weights = randn(T, H).to(HALF), integers(0, E, T, 2).int(), randn(T, 2, seed=4).softmax(-1)
    out = moe_mlp(x, ids, weights, stack_scaled(gates, E), stack_scaled(downs, E))

    def gemm(rows: QuantizedRows, each: list[int], weights: list[ScaledWeight]) -> Tensor:
        """Of every row with a weight of its own."""
        pairs = (plain(QuantizedRows(*(t[i : i + 1] for t in rows)), weights[e]) for i, e in enumerate(each))
        return torch.cat([row @ w.T for row, w in pairs])

    experts = ids.flatten().tolist()
    rows = QuantizedRows(*(t.repeat_interleave(2, dim=0) for t in quantize_rows(x, fp8, group)))
    gate, up = (gemm(rows, experts, gates[first::2]) for first in (0, 1))
    hidden = (torch.nn.functional.silu(gate) * up).to(HALF)
    routes = gemm(quantize_rows(hidden, fp8, group), experts, downs) * weights.flatten()[:, None]
    truth = routes.unflatten(0, (T, 2)).sum(1)
    assert (out.float() - truth).norm() <= 0.02 * truth.norm()


def rows_of(weight: GroupedWeight, order: Tensor) -> dict[str, Any]:
    """Some rows, as fields."""
    return {
        "num_outputs": len(order),
        "words": take_rows(weight.words, order) if weight.codebook == E2M1 else weight.words[order],
        "scales": weight.scales[:, order],
        "offsets": None if weight.offsets is None else weight.offsets[:, order],
        "super_scales": None if weight.super_scales is None else weight.super_scales[:, order],
        "high": None if weight.high is None else weight.high[order],
    }


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("in_parts", [False, True])
def test_routes_are_sorted_into_tiles_of_one_expert(
    in_parts: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts 2 and 5 have no routes; others are elsewhere."""
    monkeypatch.setattr(sorting, "MIN_PARTS_ROUTES", 0 if in_parts else 10**9)
    ids = integers(-1, 7, 500, 3).int()
    ids[(ids == 2) | (ids == 5)] = 0
    routes, tile_experts, num_routes, block = sort_by_expert(ids, 6, block)
    seen = []
    for tile, expert in enumerate(tile_experts.tolist()):
        if expert >= 0:
            inside = routes[tile * block : (tile + 1) * block].tolist()
            here = [route for route in inside if route < num_routes]
            assert here and inside == here + [num_routes] * (block - len(here))
            assert {int(ids.flatten()[route]) for route in here} == {expert}
            seen += here
    found = [expert for expert in tile_experts.tolist() if expert >= 0]
    assert found == sorted(found) and tile_experts[: len(found)].tolist() == found
    assert seen == [int(route) for e in (0, 1, 3, 4) for route in (ids.flatten() == e).nonzero()]
    assert sort_by_expert(ids[:1, :1], 6, 16).tile_experts.shape == (2,)


def test_rows_are_gathered_in_the_order_of_tiles() -> None:
    """More columns than a program takes at once; rows that are not whole in memory, and padding that is anything."""
    x, ids = randn(20, 1300)[:, :1100].to(HALF), integers(-1, 4, 20, 3).int()
    routed = sort_by_expert(ids, 3, 16)
    experts = routed.tile_experts.repeat_interleave(16)
    here = (routed.routes < 60) & (experts >= 0) & (experts < 3)
    gathered = gather_routes(x, routed, 3, 3)
    assert here.sum() == ((ids >= 0) & (ids < 3)).sum()
    assert torch.equal(gathered[here], x[routed.routes[here] // 3])
