"""Tiles of the kernel for many rows of weights in groups (`linear/grouped_wide.py`), each in a process of its own.

    python -m benchmarks.gpu.matmuls_wide 3        compile tile 3 with all splits, and compare it with the plain result

A kernel that never ends, or reads past its memory, takes its process with it and no other; what is compiled there lies
in Triton's cache. `benchmarks.gpu.matmuls --sweep --wide` times the tiles that passed."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.grouped_config import best_splits
from quire.ops.gpu.linear.grouped_layout import pack_zero_points
from quire.ops.gpu.linear.grouped_wide import wide_kernel
from quire.ops.gpu.linear.tile_times import SPLITS
from quire.ops.gpu.linear.wide_config import MIN_SHARE, WideConfig

MAX_ERROR = 6e-3  # bf16 weights, bf16 results
SECONDS = 75.0  # a tile's process has
# (tile with one split, the rows it is for)
TILES = [
    (WideConfig(16, 128, 1, 4, 4, resident=2), (8, 16)),
    (WideConfig(32, 128, 1, 4, 4, resident=2), (32,)),
    (WideConfig(32, 64, 1, 4, 4, registers=128, resident=4), (32,)),
    (WideConfig(64, 64, 1, 4, 3, registers=168, resident=3), (64,)),
    (WideConfig(64, 128, 1, 4, 6, 64, resident=2), (64, 128)),
    (WideConfig(64, 128, 1, 4, 3, resident=2), (64, 128)),
    (WideConfig(64, 128, 1, 8, 3, registers=128, resident=2), (64, 128)),
    (WideConfig(128, 128, 1, 8, 6, 64), (128, 256, 512)),
    (WideConfig(128, 128, 1, 8, 3), (128, 256, 512)),
    (WideConfig(256, 128, 1, 8, 6, 64), (256, 512)),
    (WideConfig(256, 128, 1, 8, 3), (256, 512)),
]


def wide_configs(M: int, N: int, K: int, passed: set[int]) -> list[WideConfig]:
    """Of the tiles that passed: with the splits that should be best, and with twice and half as many."""
    found: dict[WideConfig, None] = {}
    for index, (tile, sizes) in enumerate(TILES):
        if index in passed and M in sizes:
            chosen = best_splits(-(-M // tile.block_m) * -(-N // tile.block_n), K // 256, tile.resident)
            for splits in sorted({chosen, max(chosen // 2, 1), chosen * 2} & set(_splits(tile))):
                found[tile._replace(splits=splits)] = None
    return list(found)


def _splits(tile: WideConfig) -> list[int]:
    return [splits for splits in SPLITS if tile.block_n // splits >= MIN_SHARE]


def try_tile(index: int) -> int:
    """-> 0 where results are right with every number of splits; says what is wrong."""
    torch.manual_seed(index)
    tile, N, K = TILES[index][0], 640, 4096
    q = torch.randint(0, 16, (N, K), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(N, K // 128, device="cuda") / 64).half()
    weight = pack_zero_points(q, scales, torch.randint(4, 12, scales.shape, device="cuda"))
    x = torch.randn(tile.block_m + 5, K, device="cuda", dtype=torch.bfloat16)
    truth = x.double() @ dequantize(weight, torch.float16).double().T
    wrong = 0
    for splits in _splits(tile):
        for rows in (tile.block_m + 5, tile.block_m - 3):
            y = wide_kernel(x[:rows], weight, None, tile._replace(splits=splits)).double()
            error = float((y - truth[:rows]).norm() / truth[:rows].norm())
            if not error < MAX_ERROR:
                print(f"relative error {error:.1e} with {splits} splits, {rows} rows")
                wrong += 1
        if splits == 1 and not wrong:
            print(f"relative error {error:.1e}", flush=True)
    return min(wrong, 1)


def tiles_that_pass() -> set[int]:
    """All tiles at once, in processes; prints what became of each."""
    passed = set()
    with ThreadPoolExecutor(len(TILES)) as pool:
        for index, (code, said) in enumerate(pool.map(_try_in_process, range(len(TILES)))):
            print(f"tile {index:2} {'passed' if code == 0 else 'FAILED'} {TILES[index][0]}: {said}", flush=True)
            if code == 0:
                passed.add(index)
    return passed


def _try_in_process(index: int) -> tuple[int, str]:
    command = [sys.executable, "-m", "benchmarks.gpu.matmuls_wide", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 1, f"not done after {SECONDS:.0f} s"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return done.returncode, (lines[0] if done.returncode == 0 else " | ".join(lines[:2] + lines[-3:]))[:400]


if __name__ == "__main__":
    sys.exit(try_tile(int(sys.argv[1])))
