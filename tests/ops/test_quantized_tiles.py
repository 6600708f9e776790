"""Quantized experts with many routes: which tiles are chosen, and, on a Hopper GPU, the kernel beside its plain
definition."""

import os
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ops.gemms import DEVICE, integers, randn
from ops.stored_blocks import stored_rows
from quire.ops.gpu.activation import activate_and_mul
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.e2m1 import E2M1
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.gpu.linear.wide_format import slab_format
from quire.ops.gpu.moe import moe
from quire.ops.gpu.moe.moe import moe_mlp
from quire.ops.gpu.moe.mxfp4_config import TILES as MXFP4_TILES
from quire.ops.gpu.moe.mxfp4_config import MXFP4Tile, can_stream, mxfp4_tile, mxfp4_tile_of
from quire.ops.gpu.moe.quantized import QuantizedExperts, stack_experts
from quire.ops.gpu.moe.quantized_config import TILES, tile_of, wide_tile
from quire.ops.opset import Activation
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
HOPPER = torch.cuda.is_available() and has_wide_kernel(torch.device("cuda", 0))
TRANSLATED = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0"  # compile_only.py
NEEDS_HOPPER = pytest.mark.skipif(not HOPPER and not TRANSLATED, reason="a Hopper GPU's instructions")
EXPERTS, CHOSEN = 4, 3
Experts = tuple[QuantizedExperts, QuantizedExperts]


def weight_of(name: str, N: int, K: int, seed: int) -> GroupedWeight:
    if name in STORAGE_TYPES:
        tensor = StoredTensor(name, (N, K), STORAGE_TYPES[name], stored_rows(STORAGE_TYPES[name], N, K))
        return cast(GroupedWeight, load_quantized([tensor], torch.device(DEVICE)))
    group = int(name.split()[-1])
    q, scales = (
        integers(0, 16, N, K, seed=seed).to(torch.uint8),
        (randn(N, K // group, seed=seed + 1).abs() / 64).half(),
    )
    if name.startswith("e2m1"):
        return pack_codebook4(q, 2.0 ** integers(-9, -4, N, K // group, seed=seed), E2M1)
    if name.startswith("points"):
        return pack_zero_points(q, scales, integers(0, 17, N, K // group, seed=seed))
    if name.startswith("8 bits"):
        return pack_int8(integers(-127, 128, N, K, seed=seed).to(torch.int8), scales / 16)
    return pack_int4(q, scales, zero=8)


def experts_of(name: str, H: int, inner: int) -> Experts:
    gate_up, down = weight_of(name, EXPERTS * 2 * inner, H, 1), weight_of(name, EXPERTS * H, inner, 5)
    return stack_experts([gate_up], EXPERTS), stack_experts([down], EXPERTS)


def plain_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, activation: Activation, biases: tuple[Tensor, Tensor]
) -> Tensor:
    """Expert by expert, in fp32, with what is stored between the GEMMs rounded."""
    gate_up, down = (dequantize(part.rows, BF16).float().unflatten(0, (EXPERTS, -1)) for part in experts)
    out = torch.zeros(len(x), down.shape[1], device=x.device)
    for expert in range(EXPERTS):
        rows = x.float() @ gate_up[expert].T + biases[0][expert]
        hidden = activate_and_mul(rows, activation).to(x.dtype).float()
        share = torch.where(ids == expert, weights, 0.0).sum(1, keepdim=True)
        out += share * (hidden @ down[expert].T + biases[1][expert])
    return out


def routed(T: int, H: int) -> tuple[Tensor, Tensor, Tensor]:
    """Most tokens have expert 0, none has expert 1; some experts are of other devices."""
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(t)) for t in range(T)])
    ids = torch.tensor([0, 2, 3, EXPERTS])[ids].int()[:, :CHOSEN]
    ids[::5, 0], ids[1::7, 1] = -1, 0
    return randn(T, H).to(BF16), ids.to(DEVICE), randn(T, CHOSEN, seed=3).softmax(-1)


CASES: dict[str, tuple[str, int, int]] = {  # format, inputs of gate and up, of down: whole spans and others
    "MXFP4": ("e2m1 32", 704, 320),
    "MXFP4 of gpt-oss": ("e2m1 32", 2880, 448),
    "MXFP4 of whole spans": ("MXFP4", 512, 256),
    "GPTQ": ("points 128", 512, 384),
    "points of 32": ("points 32", 704, 320),
    "4 bits": ("4 bits 128", 640, 256),
    "4 bits of 32": ("4 bits 32", 320, 704),
    "8 bits": ("8 bits 128", 384, 640),
    "8 bits of 32": ("8 bits 32", 256, 320 + 64),
    **{name: (name, 512, 256) for name in ("Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")},
}


@NEEDS_HOPPER
@pytest.mark.parametrize("name", CASES)
def test_wide_tiles_of_experts_beside_plain_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that fill no tile, tiles that are full, half full and almost empty; once with biases and a clamped
    activation."""
    monkeypatch.setattr(moe, "mxfp4_tile", lambda *args: None)
    stored, H, inner = CASES[name]
    experts, (x, ids, weights) = experts_of(stored, H, inner), routed(300, H)
    biases = randn(EXPERTS, 2 * inner, seed=6), randn(EXPERTS, H, seed=7)
    none = torch.zeros_like(biases[0]), torch.zeros_like(biases[1])
    truth = plain_mlp(x, ids, weights, experts, Activation.SILU, none)
    with_biases = plain_mlp(x, ids, weights, experts, Activation.CLAMPED_SWIGLU, biases)
    number, tiles = list(CASES).index(name), list(TILES.values())
    for tile in tiles if number < 2 else [tiles[number % len(tiles)]]:  # kernels take long to compile
        monkeypatch.setattr(moe, "wide_tile", lambda *args, tile=tile: tile)
        given = x, ids, weights, *experts
        calls: list[Any] = [partial(moe_mlp, *given), partial(moe_mlp, *given, Activation.CLAMPED_SWIGLU, *biases)]
        if HOPPER:
            compile_ahead(calls)
        for call, expected in zip(calls, (truth, with_biases), strict=True):
            # Beside the numbers of a file, the plain weights, which are bf16, are off by 5 to 9e-3 themselves.
            tolerance = 1.5e-2 if name in STORAGE_TYPES else 6e-3
            assert (call().float() - expected).norm() <= tolerance * expected.norm()


@NEEDS_HOPPER
@pytest.mark.parametrize("tile", list(MXFP4_TILES.values()), ids=str)
def test_streamed_experts_beside_plain_ones(tile: MXFP4Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and outputs that end within a chunk and a tile."""
    monkeypatch.setattr(moe, "mxfp4_tile", lambda *args: tile)
    experts, (x, ids, weights) = experts_of("e2m1 32", 2880, 320), routed(300, 2880)
    biases = randn(EXPERTS, 640, seed=6), randn(EXPERTS, 2880, seed=7)
    none = torch.zeros_like(biases[0]), torch.zeros_like(biases[1])
    given = x, ids, weights, *experts
    calls: list[Any] = [partial(moe_mlp, *given), partial(moe_mlp, *given, Activation.CLAMPED_SWIGLU, *biases)]
    if HOPPER:
        compile_ahead(calls)
    truths = (Activation.SILU, none), (Activation.CLAMPED_SWIGLU, biases)
    for call, (activation, added) in zip(calls, truths, strict=True):
        expected = plain_mlp(x, ids, weights, experts, activation, added)
        for _ in range(3):  # a race would not give the same sums
            assert (call().float() - expected).norm() <= 6e-3 * expected.norm()


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU's instructions")
def test_tiles_of_experts_in_a_graph_and_not_with_batch_invariant() -> None:
    (x, ids, weights), experts = routed(300, 704), experts_of("e2m1 32", 704, 320)
    assert (wide_tile(x, *experts, 900) is not None) == HOPPER
    eager = moe_mlp(x, ids, weights, *experts, overlap=True)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = moe_mlp(torch.relu(given) - torch.relu(-given), ids, weights, *experts, overlap=True)
    given.copy_(x)
    graph.replay()
    assert torch.equal(captured, eager)
    invariant = partial(moe_mlp, gate_up=experts[0], down=experts[1], batch_invariant=True)
    alone = invariant(x[2:3], ids[2:3], weights[2:3])
    assert torch.equal(alone, invariant(x, ids, weights)[2:3])


def test_which_experts_and_routes_have_wide_tiles() -> None:
    assert slab_format(weight_of("e2m1 32", 8, 2880, 1)) is not None
    assert slab_format(weight_of("e2m1 32", 8, 2880 + 32, 1)) is None, "inputs are whole slabs"
    assert slab_format(weight_of("4 bits 64", 8, 192, 1)) is None, "a span at least"
    q, scales = integers(0, 16, 8, 512).to(torch.uint8), torch.ones(8, 16, device=DEVICE)
    assert slab_format(pack_codebook4(q, scales, E2M1)) is not None
    assert slab_format(pack_codebook4(q, scales, range(16))) is None, "another codebook"
    assert slab_format(pack_codebook4(q, 1.5 * scales, E2M1)) is None, "scales are powers of two"
    cases = ("e2m1 32", 8, 2880), ("e2m1 32", 8, 512), ("4 bits 128", 8, 512)
    weights = [weight_of(*case, 1) for case in cases]
    tiles = [[tile_of(routes, weight) for routes in (4, 8, 16, 32, 64, 100, 1024)] for weight in weights]
    sizes = [[None if tile is None else tile.block_m for tile in chosen] for chosen in tiles]
    assert sizes[0] == [None, 16, 32, 64, 128, 128, 256]
    assert sizes[1] == [None, 16, 32, 64, 64, 256, 256] and sizes[2] == [None, None, None, 64, 64, 256, 256]


def test_which_experts_and_routes_are_streamed() -> None:
    experts, others = experts_of("e2m1 32", 2880, 320), experts_of("e2m1 32", 512, 320)
    assert all(map(can_stream, experts)) and not can_stream(others[0]), "chunks of 128 inputs"
    assert not can_stream(experts_of("4 bits 32", 320, 320)[0])
    (x, _, _) = routed(30, 2880)
    assert (mxfp4_tile(x, *experts, 900) is not None) == HOPPER
    assert mxfp4_tile(x.float(), *experts, 900) is None and mxfp4_tile(x, x, x, 900) is None
    tiles = [mxfp4_tile_of(routes) for routes in (2, 8, 16, 32, 100, 1024)]
    assert [None if tile is None else tile.block_m for tile in tiles] == [None, 16, 32, 64, 128, 128]
