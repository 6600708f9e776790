"""W4A8 on Hopper: which tiles are chosen, what the instructions look up, and, on such a GPU, the kernel beside its
plain definition."""

import os
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.gemms import DEVICE, integers, randn
from ops.ptx import execute
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.w4a8 import LARGE_TILES, W4A8Weight, pack_w4a8, w4a8_linear
from quire.ops.gpu.linear.w4a8_instructions import UNIT, fp8_instructions
from quire.ops.gpu.linear.w4a8_wide_config import TILES, W4A8WideConfig, can_be_wide, splits_of, wide_config
from quire.ops.gpu.linear.wide_config import has_wide_kernel
from quire.ops.reference import quantized_linear as plain

pytestmark = pytest.mark.slow
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HOPPER = torch.cuda.is_available() and has_wide_kernel(torch.device("cuda", 0))
TRANSLATED = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0"  # compile_only.py


def weights(N: int, K: int, group: int = 128) -> tuple[W4A8Weight, Tensor, Tensor]:
    q, scales = integers(0, 16, N, K), (randn(N, K // group, seed=1).abs() / 64).half()
    return pack_w4a8(q.to(torch.uint8), scales), q - 8, scales


def rows(M: int, K: int) -> QuantizedRows:
    return QuantizedRows(*plain.quantize_tokens(randn(M, K, seed=3), FP8))


def assert_plain(y: Tensor, x: QuantizedRows, q: Tensor, scales: Tensor) -> None:
    """As a share of each output's sum of magnitudes: tensor cores add up 128 inputs with some 14 bits."""
    expected = plain.w4a8_linear(*x, q, scales)
    size = plain.w4a8_linear(x.q.float().abs().to(FP8), x.scales, q.abs(), scales.abs())
    assert y.isfinite().all()
    assert ((y.float() - expected).abs() <= 2**-10 * size + torch.finfo(y.dtype).eps * expected.abs() + 1e-6).all()


# Microseconds on an H200: tiles that any GPU has, and wide ones by their outputs and the number of splits.
MEASURED = {
    ("gate_up", 64): (31.2, {(256, 1): 27.3}), ("gate_up", 128): (47.5, {(128, 1): 37.4}),
    ("gate_up", 256): (90.6, {(128, 1): 67.6}), ("gate_up", 512): (174.5, {(128, 1): 115.8}),
    ("down", 64): (17.6, {}), ("down", 128): (28.3, {(128, 2): 35.2, (128, 4): 24.0}),
    ("down", 256): (44.4, {(128, 1): 56.9, (128, 2): 35.4}), ("down", 512): (79.6, {(128, 1): 55.7}),
    ("qkv", 64): (10.8, {}), ("qkv", 128): (15.3, {(128, 1): 19.1, (128, 2): 17.3}),
    ("qkv", 256): (23.2, {(128, 1): 19.5}), ("qkv", 512): (50.1, {(128, 1): 34.5}),
    ("o", 64): (9.0, {}), ("o", 128): (11.8, {(128, 1): 18.6, (128, 2): 15.8, (128, 4): 14.8}),
    ("o", 256): (15.9, {(128, 1): 18.9, (128, 2): 17.6}), ("o", 512): (25.6, {(128, 1): 19.5}),
}  # fmt: skip


def test_the_tiles_chosen_are_about_the_fastest_measured() -> None:
    for (shape, M), (others, wide) in MEASURED.items():
        config = wide_config(M, *SHAPES[shape], LARGE_TILES)
        us = others if config is None else wide[config.block_n, config.splits]
        assert us <= 1.04 * min([others, *wide.values()]), (shape, M, config)
    assert all(wide_config(32, *shape, LARGE_TILES) is None for shape in SHAPES.values())


@pytest.mark.parametrize("words", [range(2), range(2, 4), range(4)])
def test_the_instructions_make_fp8_values(words: range) -> None:
    values = [[(7 * plane + 3 * i + i * plane) % 16 for i in range(4)] for plane in range(8)]
    quad = [0, 0, 0, 0]
    for plane, of_plane in enumerate(values):
        for i, value in enumerate(of_plane):
            quad[plane // 2] |= value << 8 * i + 4 * (plane % 2)
    planes = execute(fp8_instructions(words), tuple(quad), 2 * len(words), BF16)
    as_fp8 = [plane.view(torch.uint8).view(FP8).float() * UNIT for plane in planes]
    assert torch.equal(torch.stack(as_fp8).long(), torch.tensor(values[2 * words[0] : 2 * words[-1] + 2]) - 8)


def test_which_weights_can_be_wide() -> None:
    assert can_be_wide(weights(128, 512)[0].shuffled)
    assert not can_be_wide(weights(128, 384)[0].shuffled)  # half a chunk at the end
    assert not can_be_wide(weights(70, 512)[0].shuffled)  # part of a tile
    assert not can_be_wide(weights(128, 512, group=32)[0].shuffled)


def test_splits_have_as_many_chunks_as_each_other() -> None:
    for M in (33, 65, 128, 200, 512, 4096):
        for N in (128, 384, 1024, 4096, 28672):
            for K in range(256, 16384, 256):
                if (config := wide_config(M, N, K, LARGE_TILES)) is not None:
                    assert N % config.block_n == 0 and K // 256 % config.splits == 0


@pytest.mark.skipif(not HOPPER and not TRANSLATED, reason="a Hopper GPU's instructions")
@pytest.mark.parametrize("N,K,M", [(256, 4096, 300), (768, 2048, 300), (4096, 512, 1100)])
def test_wide_products_beside_plain_ones(N: int, K: int, M: int) -> None:
    """Rows that fill no tile, several splits, programs that take several tiles, and tickets left at zero."""
    from quire.ops.gpu.linear.w4a8_wide import w4a8_wide_kernel

    (weight, q, scales), tickets = weights(N, K), new_tickets(DEVICE)
    configs = [tile._replace(splits=splits) for tile in TILES for splits in splits_of(tile, N, K)]
    all_rows = rows(M, K)

    def run(config: W4A8WideConfig, x: QuantizedRows) -> Tensor:
        return w4a8_wide_kernel(x, weight.shuffled, BF16, config, tickets)

    if HOPPER:  # several at a time
        compile_ahead(partial(run, config, all_rows) for config in configs)
    for config in configs:
        for some in {config.block_m - 3, config.block_m + 5, M}:
            x = QuantizedRows(all_rows.q[:some], all_rows.scales[:some])
            assert_plain(run(config, x), x, q, scales)
            assert not tickets.any()


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU's instructions")
@pytest.mark.parametrize("M", [64, 128, 200])
def test_many_rows_take_wide_tiles(M: int) -> None:
    """Also in a CUDA graph, and with inputs that are the kernel's before."""
    (weight, q, scales), tickets = weights(28672, 2048), new_tickets(DEVICE)
    assert wide_config(M, 28672, 2048, LARGE_TILES) is not None
    x = randn(M, 2048, seed=3).to(BF16)

    def run(x: Tensor) -> Tensor:
        return w4a8_linear(quantize_rows(x, FP8, 0, True), weight, tickets=tickets, overlap=True)

    eager = run(x)
    assert_plain(eager, quantize_rows(x, FP8), q, scales)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = run(F.relu(given) - F.relu(-given))
    given.copy_(x)
    graph.replay()
    assert torch.equal(captured, eager)
