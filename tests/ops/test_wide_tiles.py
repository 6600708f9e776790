"""Many rows of 4- and 8-bit weights: which tiles are chosen, what the instructions unpack, and, on a Hopper GPU, the
kernel beside its plain definition."""

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from ops.gemms import DEVICE, assert_close, integers, randn
from ops.ptx import execute
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.grouped import grouped_linear
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_int4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.w4a8 import W4A8Weight, w4a8_config
from quire.ops.gpu.linear.wide_config import LARGE, SMALL, can_be_wide, has_wide_kernel, wide_config

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
BF16 = torch.bfloat16
HOPPER = torch.cuda.is_available() and has_wide_kernel(torch.device("cuda", 0))
TRANSLATED = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0"  # compile_only.py


def measured(name: str, kind: str) -> list[dict[str, Any]]:
    lines = (RESULTS / f"2026-11-18-h200-matmuls-{name}.jsonl").read_text().splitlines()
    return [case for line in lines if (case := json.loads(line)).get("format") == kind]


def like(shape: str, bits: int = 4) -> GroupedWeight:
    """All that a choice looks at."""
    N, K = SHAPES[shape]
    return cast(GroupedWeight, SimpleNamespace(num_outputs=N, num_inputs=K, bits=bits, num_chunks=K // 256))


# Microseconds on an H200 by tokens of a tile and splits, since all programs of a tile add up its sums.
WIDE_US: dict[tuple[str, int], dict[tuple[int, int], float]] = {
    ("qkv", 64): {(64, 1): 25.1, (64, 2): 17.3, (64, 4): 18.1, (64, 8): 25.0},
    ("qkv", 128): {(128, 1): 30.5, (128, 2): 20.6, (128, 4): 29.2},
    ("qkv", 256): {(128, 1): 31.3, (128, 2): 41.6, (256, 1): 42.9, (256, 2): 31.2, (256, 4): 43.7},
    ("qkv", 512): {(128, 1): 60.7, (256, 1): 43.5, (256, 2): 60.2},
    ("o", 64): {(64, 1): 24.9, (64, 2): 16.3, (64, 4): 12.0, (64, 8): 12.4},
    ("o", 128): {(128, 1): 30.3, (128, 2): 19.6, (128, 4): 15.3, (128, 8): 24.6},
    ("o", 256): {(128, 1): 31.0, (128, 2): 21.8, (128, 4): 28.1, (256, 1): 41.7, (256, 2): 28.3, (256, 4): 21.5},
    ("o", 512): {(128, 1): 32.5, (128, 2): 41.8, (256, 1): 42.4, (256, 2): 31.8, (256, 4): 47.2},
    ("gate_up", 64): {(64, 1): 44.9, (64, 2): 52.1},
    ("gate_up", 128): {(128, 1): 66.5},
    ("gate_up", 256): {(128, 1): 124.1, (256, 1): 90.9},
    ("gate_up", 512): {(128, 1): 217.9, (256, 1): 185.5},
    ("down", 64): {(64, 1): 81.9, (64, 2): 45.7, (64, 4): 27.7, (64, 8): 25.6},
    ("down", 128): {(128, 1): 98.7, (128, 2): 57.8, (128, 4): 34.9, (128, 8): 45.7},
    ("down", 256): {(128, 1): 98.7, (128, 2): 58.9, (128, 4): 65.6, (256, 1): 134.4, (256, 2): 75.7, (256, 4): 48.0},
    ("down", 512): {(128, 1): 102.5, (128, 2): 112.0, (256, 1): 136.2, (256, 2): 84.6, (256, 4): 102.7},
}


def test_the_tiles_chosen_are_about_the_fastest_measured() -> None:
    cases = [case for case in measured("wide", "int4") if case["rows"] >= 64]
    assert len(cases) == len(WIDE_US)
    for case in cases:
        wide = WIDE_US[case["shape"], case["rows"]]
        # Dequantizing is weighed beyond 256 rows.
        others = [case["engine_us"]] + ([case["dequantized_us"]] if case["rows"] > 256 else [])
        config = wide_config(case["rows"], like(case["shape"]))
        us = min(others) if config is None else wide[config.block_m, config.splits]
        assert us <= 1.07 * min([*others, *wide.values()]), (case["shape"], case["rows"], config)
    assert [wide_config(32, like(shape)) for shape in SHAPES] == [None] * 4


def test_tiles_of_w4a8_depend_on_the_shape() -> None:
    for case in measured("sweep", "w4a8"):
        if case["rows"] > 64:
            times = {tuple(c[:3]): us for us, c in reversed(case["best"]) if c[6] == 0 and c[5] == 3}
            config = w4a8_config(case["rows"], cast(W4A8Weight, SimpleNamespace(
                num_outputs=SHAPES[case["shape"]][0], shuffled=like(case["shape"]))))  # fmt: skip
            assert times[tuple(config[:3])] <= 1.03 * min(times.values()), (case["shape"], case["rows"], config)


def test_very_many_rows_are_left_to_cublas() -> None:
    assert wide_config(512, like("gate_up")) is not None
    assert [wide_config(2048, like(shape)) for shape in SHAPES] == [None] * 4
    assert wide_config(64, like("gate_up", bits=8)) is None and wide_config(65, like("gate_up", bits=8)) is not None


@pytest.mark.parametrize("bits", [4, 8])
def test_the_instructions_scale_as_dequantizing_does(bits: int) -> None:
    unpack_planes = pytest.importorskip("quire.ops.gpu.linear.grouped_wide").unpack_planes
    point = 9 if bits == 4 else 0
    for number in range(0, 256, 3):
        halves = (number | (number * 7 + 1) % 256 << 8) | ((number * 5 + 2) % 256 | (number * 3) % 256 << 8) << 16
        scale = torch.tensor(0.001 + number / 7919).half().float()
        main = scale.to(BF16)
        words = [int(value.view(torch.uint16)) * 0x10001 for value in (main, (scale - main.float()).to(BF16))]
        planes = [
            plane
            for asm in unpack_planes(bits, "pair")
            for plane in execute(asm, (halves, (0xC300 | point) * 0x10001, *words), 2, BF16)
        ]
        for index, plane in enumerate(planes):
            for half in (0, 1):
                code = halves >> (16 * half + bits * index) & ((1 << bits) - 1)
                q = code - point if bits == 4 else (code ^ 128) - 128
                exact = scale * q
                # The last bit of 8 bits times a scale may be lost before it is rounded.
                assert plane[half] == exact.to(BF16) or (
                    bits == 8 and abs(plane[half] - exact) < 0.505 * exact.abs() / 128
                )


def weights(N: int, K: int) -> dict[str, GroupedWeight]:
    scales = (randn(N, K // 128, seed=1).abs() / 64).half()
    q, points = integers(0, 16, N, K).to(torch.uint8), integers(0, 17, N, K // 128, seed=2)
    return {
        "zero points": pack_zero_points(q, scales, points),
        "symmetric": pack_int4(q, scales, zero=8),
        "8 bits": pack_int8(integers(-127, 128, N, K, seed=5).to(torch.int8), scales),
    }


@pytest.mark.parametrize("name", ["zero points", "symmetric", "8 bits"])
def test_which_weights_can_be_wide(name: str) -> None:
    assert can_be_wide(weights(70, 512)[name])
    assert not can_be_wide(weights(70, 384)[name]) or name == "8 bits"
    q, scales = integers(0, 16, 70, 512).to(torch.uint8), randn(70, 16).half()
    assert not can_be_wide(pack_int4(q, scales, zero=8))  # groups of 32


@pytest.mark.skipif(not HOPPER and not TRANSLATED, reason="a Hopper GPU's instructions")
@pytest.mark.parametrize("name", ["zero points", "symmetric", "8 bits"])
@pytest.mark.parametrize("N,K", [(70, 512), (328, 1280)])
def test_wide_products_beside_plain_ones(name: str, N: int, K: int) -> None:
    """Rows and outputs that fill no tile, chunks that do not fill the splits, a bias, and tickets left at zero. Without
    polls, programs leave their shares of the sums to the last of a tile, as where not all have room."""
    from quire.ops.gpu.linear.grouped_wide import wide_kernel

    weight, tickets, bias = weights(N, K)[name], new_tickets(DEVICE), randn(N, seed=4)
    numbers, rows = dequantize(weight, BF16), randn(300, K, seed=3).to(BF16)
    splits_and_polls = [(1, 0), (2, 2000), (2, 0), (4, 2000), (8, 2000), (8, 0)]
    configs = [
        config._replace(splits=splits, polls=polls) for config in [*SMALL, *LARGE] for splits, polls in splits_and_polls
    ]
    if HOPPER:  # several at a time
        compile_ahead(partial(wide_kernel, rows, weight, bias, config, tickets) for config in configs)
    for config in configs:
        for x in (rows[: config.block_m - 3], rows[: config.block_m + 5]):
            y = wide_kernel(x, weight, bias, config, tickets)
            # 8 bits: a weight in a thousand is rounded to the neighbour.
            assert_close(y, x, numbers, bias, tolerance=3e-4 if name == "8 bits" else 2e-5)
            assert not tickets.any()


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU's instructions")
def test_wide_tiles_are_compiled_ahead() -> None:
    from quire.ops.gpu.linear.grouped_wide import wide_kernel

    weight, x = weights(70, 2048)["zero points"], randn(100, 2048, seed=3).to(BF16)
    config = next(iter(LARGE))._replace(splits=8)
    assert compile_ahead([partial(wide_kernel, x, weight, None, config)]) == 1
    assert compile_ahead([partial(wide_kernel, x, weight, None, config)]) == 0
    assert_close(wide_kernel(x, weight, None, config), x, dequantize(weight, BF16), tolerance=2e-5)


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU's instructions")
@pytest.mark.parametrize("name", ["zero points", "8 bits"])
@pytest.mark.parametrize("M", [100, 256])
def test_many_rows_take_wide_tiles(name: str, M: int) -> None:
    """Also in a CUDA graph, and with inputs that are the kernel's before."""
    weight, tickets = weights(16384, 2048)[name], new_tickets(DEVICE)
    assert wide_config(M, weight) is not None
    x = randn(M, 2048, seed=3).to(BF16)
    eager = grouped_linear(x, weight, tickets=tickets, overlap=True)
    assert_close(eager, x, dequantize(weight, BF16), tolerance=3e-4)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = grouped_linear(F.relu(given) - F.relu(-given), weight, tickets=tickets, overlap=True)
    given.copy_(x)
    graph.replay()
    assert torch.equal(captured, eager)
