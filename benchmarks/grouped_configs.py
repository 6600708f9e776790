"""Tiles for matmuls with 4-bit weights on a GPU: which is fastest for each number of rows, beside cuBLAS in 16 bits.

    python -m benchmarks.grouped_configs [--rows 32 64 128 256 512] [--seconds 240] [--group 128] [--offsets]

The four matrices of a layer of Llama 3.1 8B. A row of the table: microseconds of all four with each one's best tile,
with the tiles that the engine chooses, dequantized for cuBLAS, and in bf16 from the start. Ends in one line of JSON."""

import argparse
import json
import time
from typing import Any

import torch
import torch.nn.functional as F
import triton

from benchmarks.machine import describe
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.grouped import GroupedConfig, grouped_config, grouped_kernel
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_int4
from quire.ops.gpu.linear.split_k import new_tickets

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}  # outputs, inputs
# (block_m, block_n, warps, stages)
TILES = [
    (128, 128, 8, 3), (128, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 4), (32, 64, 4, 3),
    (32, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 4), (256, 128, 8, 3), (256, 64, 8, 3), (128, 256, 8, 3),
    (64, 256, 8, 3),
]  # fmt: skip
WIDTHS = (32,)
SPLITS = (1, 2, 4)


def weight(name: str, group: int, width: int, offsets: bool) -> GroupedWeight:
    N, K = SHAPES[name]
    make = torch.Generator("cuda").manual_seed(0)
    q = torch.randint(0, 16, (N, K), dtype=torch.uint8, device="cuda", generator=make)
    scales = torch.rand(N, K // group, device="cuda", generator=make).half() * 0.01
    return pack_int4(q, scales, -8 * scales if offsets else None, zero=0 if offsets else 8, width=width)


def microseconds(run: Any, *arguments: Any) -> float:
    """The median, with caches that hold other data before each run."""
    timed = triton.testing.do_bench(lambda: run(*arguments), warmup=5, rep=25, return_mode="median")
    return 1000 * float(timed)


def dequantized_linear(x: torch.Tensor, w: GroupedWeight) -> torch.Tensor:
    return F.linear(x, dequantize(w, x.dtype))


def best(x: torch.Tensor, weights: dict[int, GroupedWeight], tickets: torch.Tensor, until: float) -> tuple[float, Any]:
    found: tuple[float, Any] = (float("inf"), None)
    rows = len(x)
    for width, w in weights.items():
        expected = None
        for block_m, block_n, warps, stages in TILES:
            if block_m > max(32, triton.next_power_of_2(rows)) or (rows > 64 and block_m < 64):
                continue
            tiles = triton.cdiv(rows, block_m) * triton.cdiv(w.num_outputs, block_n)
            for splits in SPLITS:
                if splits > 1 and (tiles * splits > 600 or w.num_inputs // splits < 1024):
                    continue
                if time.monotonic() > until:
                    return found
                config = GroupedConfig(block_m, block_n, splits, False, warps, stages)
                try:
                    out = grouped_kernel(x, w, None, config, tickets)
                except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError):
                    continue
                expected = dequantized_linear(x, w) if expected is None else expected
                if not torch.allclose(out.float(), expected.float(), atol=0.05, rtol=0.05):
                    print(f"wrong: {config} {width}")
                    continue
                found = min(found, (microseconds(grouped_kernel, x, w, None, config, tickets), [width, *config]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--offsets", action="store_true", help="as GPTQ and AWQ files have them")
    parser.add_argument("--seconds", type=float, default=240.0)
    arguments = parser.parse_args()
    until = time.monotonic() + arguments.seconds
    tickets = new_tickets(torch.device("cuda"))
    rows: list[dict[str, Any]] = []
    for num_rows in arguments.rows:
        row: dict[str, Any] = {
            "rows": num_rows,
            "best": 0.0,
            "engine": 0.0,
            "dequantized": 0.0,
            "bf16": 0.0,
            "tiles": {},
        }
        for name, (N, K) in SHAPES.items():
            x = torch.randn(num_rows, K, device="cuda", dtype=torch.bfloat16)
            weights = {width: weight(name, arguments.group, width, arguments.offsets) for width in WIDTHS}
            own = weight(name, arguments.group, 0, arguments.offsets)
            full = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
            row["bf16"] += microseconds(F.linear, x, full)
            row["dequantized"] += microseconds(dequantized_linear, x, own)
            row["engine"] += microseconds(grouped_kernel, x, own, None, grouped_config(num_rows, own), tickets)
            seconds, row["tiles"][name] = best(x, weights, tickets, until)
            row["best"] += seconds
        rows.append(row)
        print(
            " ".join(
                f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    print(json.dumps({"benchmark": "grouped_configs", "machine": describe(), "group": arguments.group, "rows": rows}))


if __name__ == "__main__":
    main()
