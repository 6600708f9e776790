"""Many rows of weights in groups: which tiles are chosen, and, on a Hopper GPU, the kernel beside its plain
definition."""

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
from ops.stored_blocks import stored_rows
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.grouped import grouped_linear
from quire.ops.gpu.linear.grouped_layout import HIGH_WORDS, GroupedWeight, pack_int4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.w4a8 import W4A8Weight, w4a8_config
from quire.ops.gpu.linear.wide_config import (
    FEW,
    FEWEST,
    FIVE_BITS,
    LARGE,
    MIN_SHARE,
    SIX_BITS,
    SMALL,
    has_wide_kernel,
    wide_config,
)
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
BF16 = torch.bfloat16
HOPPER = torch.cuda.is_available() and has_wide_kernel(torch.device("cuda", 0))
TRANSLATED = not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") == "0"  # compile_only.py


def measured(name: str, kind: str) -> list[dict[str, Any]]:
    lines = (RESULTS / f"2026-11-18-h200-matmuls-{name}.jsonl").read_text().splitlines()
    return [case for line in lines if (case := json.loads(line)).get("format") == kind]


def like(shape: str, bits: int = 4, group: int = 128, high_bits: int = 0, has_offsets: bool = False) -> GroupedWeight:
    """All that a choice looks at."""
    N, K = SHAPES[shape]
    high = torch.empty(0, dtype=HIGH_WORDS[high_bits]) if high_bits else None
    return cast(GroupedWeight, SimpleNamespace(
        num_outputs=N, num_inputs=K, bits=bits, num_chunks=K // 256, group=group, has_offsets=has_offsets,
        high=high))  # fmt: skip


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
    assert wide_config(32, like("gate_up", bits=8)) is None and wide_config(64, like("gate_up", bits=8)) is not None


# GGUF's formats: microseconds of wide tiles by (tokens, splits), and of the kernel that was taken before.
GGUF_US: dict[tuple[str, str, int], tuple[dict[tuple[int, int], float], float]] = {
    ("Q4_0", "gate_up", 64): ({(64, 1): 44.1}, 70.7),
    ("Q4_0", "down", 64): ({(64, 8): 26.5}, 36.7),
    ("Q4_0", "gate_up", 128): ({(128, 1): 62.8}, 113.5),
    ("Q4_0", "down", 128): ({(128, 4): 33.5}, 67.6),
    ("Q4_0", "gate_up", 256): ({(256, 1): 94.3}, 204.3),
    ("Q4_0", "down", 256): ({(256, 4): 50.1}, 110.5),
    ("Q4_0", "gate_up", 512): ({(256, 1): 185.1}, 246.9),
    ("Q4_0", "down", 512): ({(256, 2): 87.1}, 120.4),
    ("Q4_K", "gate_up", 16): ({(16, 1): 41.3}, 49.3),
    ("Q4_K", "down", 16): ({(16, 8): 24.1}, 27.1),
    ("Q4_K", "qkv", 16): ({(16, 4): 14.6}, 17.4),
    ("Q4_K", "o", 16): ({(16, 8): 11.5}, 11.5),
    ("Q4_K", "gate_up", 32): ({(32, 1): 44.2}, 67.4),
    ("Q4_K", "down", 32): ({(32, 4): 25.6}, 33.7),
    ("Q4_K", "qkv", 32): ({(32, 4): 13.8}, 21.4),
    ("Q4_K", "o", 32): ({(32, 4): 11.6}, 14.1),
    ("Q4_K", "gate_up", 64): ({(64, 1): 49.5}, 79.3),
    ("Q4_K", "down", 64): ({(64, 8): 28.0, (64, 4): 28.8}, 40.1),
    ("Q4_K", "gate_up", 128): ({(128, 1): 68.0}, 127.2),
    ("Q4_K", "down", 128): ({(128, 4): 35.7}, 75.5),
    ("Q4_K", "gate_up", 256): ({(256, 1): 96.2}, 233.0),
    ("Q4_K", "down", 256): ({(256, 4): 50.5, (128, 2): 63.0}, 128.7),
    ("Q4_K", "gate_up", 512): ({(256, 1): 189.2}, 245.0),
    ("Q4_K", "down", 512): ({(256, 2): 89.0}, 118.0),
    ("Q5_K", "gate_up", 64): ({(64, 1): 64.6}, 89.5),
    ("Q5_K", "down", 64): ({(64, 4): 35.6}, 45.1),
    ("Q6_K", "gate_up", 16): ({(16, 1): 50.1}, 56.8),
    ("Q6_K", "down", 16): ({(16, 8): 30.4}, 31.4),
    ("Q6_K", "gate_up", 32): ({(32, 1): 54.2}, 68.4),
    ("Q6_K", "down", 32): ({(32, 4): 33.1}, 38.2),
    ("Q6_K", "gate_up", 64): ({(64, 1): 66.8}, 92.1),
    ("Q6_K", "down", 64): ({(64, 8): 41.9}, 51.0),
    ("Q6_K", "gate_up", 128): ({(128, 1): 87.2}, 160.1),
    ("Q6_K", "down", 128): ({(128, 4): 47.8}, 87.1),
    ("Q6_K", "qkv", 128): ({(128, 2): 27.7}, 35.4),
    ("Q6_K", "o", 128): ({(128, 4): 18.5}, 28.5),
    ("Q6_K", "gate_up", 256): ({(256, 1): 113.6}, 284.8),
    ("Q6_K", "down", 256): ({(256, 4): 59.7}, 153.6),
    ("Q6_K", "qkv", 256): ({(256, 2): 34.9}, 61.6),
    ("Q6_K", "o", 256): ({(256, 4): 24.2}, 47.0),
    ("Q6_K", "gate_up", 512): ({(256, 1): 216.0}, 283.5),
    ("Q6_K", "down", 512): ({(256, 2): 104.1}, 138.4),
    ("Q6_K", "qkv", 512): ({(256, 1): 52.2}, 60.4),
    ("Q6_K", "o", 512): ({(256, 2): 36.4}, 42.3),
}
GGUF: dict[str, dict[str, Any]] = {
    "Q4_0": {"group": 32}, "Q4_K": {"group": 32, "has_offsets": True},
    "Q5_K": {"group": 32, "has_offsets": True, "high_bits": 1}, "Q6_K": {"group": 16, "high_bits": 2},
}  # fmt: skip


def test_tiles_of_gguf_formats_are_those_measured_to_be_fast() -> None:
    for (name, shape, rows), (wide, before) in GGUF_US.items():
        config = wide_config(rows, like(shape, **GGUF[name]))
        us = before if config is None else wide[config.block_m, config.splits]
        assert us <= 1.05 * min([before, *wide.values()]), (name, shape, rows, config)
    assert wide_config(2, like("down", **GGUF["Q4_K"])) is not None
    assert wide_config(32, like("down", **GGUF["Q4_0"])) is None  # others are as fast


def weight_of(name: str, N: int, K: int) -> GroupedWeight:
    if name.startswith("Q"):
        tensor = StoredTensor(name, (N, K), STORAGE_TYPES[name], stored_rows(STORAGE_TYPES[name], N, K))
        return cast(GroupedWeight, load_quantized([tensor], torch.device(DEVICE)))
    group = 32 if "32" in name else 128
    scales = (randn(N, K // group, seed=1).abs() / 64).half()
    q, points = integers(0, 16, N, K).to(torch.uint8), integers(0, 17, N, K // group, seed=2)
    if "points" in name:
        return pack_zero_points(q, scales, points)
    if "8 bits" in name:
        return pack_int8(integers(-127, 128, N, K, seed=5).to(torch.int8), scales)
    return pack_int4(q, scales, zero=8)


IN_GROUPS_OF_128 = ["zero points", "symmetric", "8 bits"]
OTHERS = ["points of 32", "8 bits of 32", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
ROUNDED_TWICE = ("Q4_1", "Q2_K", "Q4_K", "Q5_K")  # offsets of random blocks, which surround no zero


@pytest.mark.skipif(not HOPPER and not TRANSLATED, reason="a Hopper GPU's instructions")
@pytest.mark.parametrize("name", [*IN_GROUPS_OF_128, *OTHERS])
@pytest.mark.parametrize("N,K", [(70, 512), (328, 1280)])
def test_wide_products_beside_plain_ones(name: str, N: int, K: int) -> None:
    """Rows and outputs that fill no tile, chunks that do not fill the splits, a bias, and tickets left at zero. Without
    polls, programs leave their shares of the sums to the last of a tile, as where not all have room."""
    from quire.ops.gpu.linear.grouped_wide import wide_kernel

    weight, tickets, bias = weight_of(name, N, K), new_tickets(DEVICE), randn(N, seed=4)
    numbers, rows = dequantize(weight, BF16), randn(300, K, seed=3).to(BF16)
    splits_and_polls = (
        [(1, 0), (2, 2000), (2, 0), (4, 2000), (8, 2000), (8, 0)] if name in IN_GROUPS_OF_128 else [(4, 0)]
    )
    tiles = [*FEWEST, *FEW, *SMALL, *FIVE_BITS, *SIX_BITS, *LARGE]
    configs = [
        tile._replace(splits=splits, polls=polls)
        for tile in tiles
        for splits, polls in splits_and_polls
        if tile.block_n // splits >= MIN_SHARE
    ]
    if HOPPER:  # several at a time
        compile_ahead(partial(wide_kernel, rows, weight, bias, config, tickets) for config in configs)
    # Of 8 bits, and of scales of two levels, a weight in some hundred is rounded to the neighbour.
    tolerance = 8e-3 if name in ROUNDED_TWICE else 3e-4 if "8 bits" in name or name.startswith("Q") else 2e-5
    for config in configs:
        for x in (rows[: config.block_m - 3], rows[: config.block_m + 5]):
            y = wide_kernel(x, weight, bias, config, tickets)
            assert_close(y, x, numbers, bias, tolerance)
            assert not tickets.any()


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU's instructions")
def test_wide_tiles_are_compiled_ahead() -> None:
    from quire.ops.gpu.linear.grouped_wide import wide_kernel

    weight, x = weight_of("zero points", 70, 2048), randn(100, 2048, seed=3).to(BF16)
    config = next(iter(LARGE))._replace(splits=8)
    assert compile_ahead([partial(wide_kernel, x, weight, None, config)]) == 1
    assert compile_ahead([partial(wide_kernel, x, weight, None, config)]) == 0
    assert_close(wide_kernel(x, weight, None, config), x, dequantize(weight, BF16), tolerance=2e-5)


@pytest.mark.skipif(not HOPPER, reason="a Hopper GPU's instructions")
@pytest.mark.parametrize("name", ["zero points", "8 bits", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("M", [100, 256])
def test_many_rows_take_wide_tiles(name: str, M: int) -> None:
    """Also in a CUDA graph, and with inputs that are the kernel's before."""
    weight, tickets = weight_of(name, 16384, 2048), new_tickets(DEVICE)
    assert wide_config(M, weight) is not None
    x = randn(M, 2048, seed=3).to(BF16)
    eager = grouped_linear(x, weight, tickets=tickets, overlap=True)
    assert_close(eager, x, dequantize(weight, BF16), tolerance=8e-3 if name in ROUNDED_TWICE else 3e-4)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        captured = grouped_linear(F.relu(given) - F.relu(-given), weight, tickets=tickets, overlap=True)
    given.copy_(x)
    graph.replay()
    assert torch.equal(captured, eager)
