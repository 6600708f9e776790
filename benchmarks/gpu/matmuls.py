"""Matmuls of a layer of Llama-3.1-8B in every format of weights, beside cuBLAS in bf16: microseconds, TB/s, TFLOP/s.

    python -m benchmarks.gpu.matmuls                              the table, M = 1 .. 512, then one line of JSON
    python -m benchmarks.gpu.matmuls --only int4 w4a8 --rows 64 128 --shapes gate_up
    python -m benchmarks.gpu.matmuls --sweep --out sweep.jsonl    tries tiles; a line of JSON for each case
    python -m benchmarks.gpu.matmuls --sweep --wide               only tiles of the kernel for many rows of int4
    python -m benchmarks.gpu.matmuls --best sweep.jsonl           what the sweep found, in short

A sweep that is started again with the same file goes on where it ended. Times are of one call within a CUDA graph over
copies of the weights that the cache cannot hold. Rows are quantized before: in the engine the kernel that computes them
does it. Every case is compared with the plain result."""

import argparse
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu.linear_quantized import clone, random_scaled
from benchmarks.gpu.linear_stored import repeated_weight
from benchmarks.gpu.matmuls_wide import tiles_that_pass, wide_configs
from benchmarks.gpu.measuring import Calls, Ceilings, compile_all, copies, relative_error, rows, seconds_a_call
from benchmarks.gpu.shapes import SHAPES
from benchmarks.machine import describe
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.grouped import grouped_kernel, grouped_linear
from quire.ops.gpu.linear.grouped_config import GroupedConfig, Tile, best_splits, grouped_config
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_int4, pack_int8, pack_zero_points
from quire.ops.gpu.linear.grouped_wide import wide_kernel
from quire.ops.gpu.linear.linear import linear
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.linear.scaled import ScaledConfig, ScaledWeight, scaled_config, scaled_kernel, scaled_linear
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.tile_times import SPLITS
from quire.ops.gpu.linear.w4a8 import W4A8Weight, shuffle_words, w4a8_config, w4a8_kernel, w4a8_linear
from quire.ops.gpu.linear.wide_config import WideConfig, can_be_wide, wide_config

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LAYER = ("qkv", "o", "gate_up", "down")
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
MAX_ERROR = 2e-2  # of fp8; 16 bits are a tenth of it


def random_int4(N: int, K: int, group: int = 128) -> GroupedWeight:
    q = torch.randint(0, 16, (N, K), dtype=torch.uint8, device="cuda")
    scales = torch.rand(N, K // group, device="cuda").half() / 64
    return pack_zero_points(q, scales, torch.randint(4, 12, scales.shape, device="cuda"))


def random_w8a16(N: int, K: int) -> GroupedWeight:
    q = torch.randint(-127, 128, (N, K), dtype=torch.int8, device="cuda")
    return pack_int8(q, torch.rand(N, K // 128, device="cuda").half() / 1024)


def random_w4a8(N: int, K: int) -> W4A8Weight:
    q = torch.randint(0, 16, (N, K), dtype=torch.uint8, device="cuda")
    return shuffle_words(pack_int4(q, torch.rand(N, K // 128, device="cuda").half() / 64, zero=8))


def copy_of(weight: Any) -> Any:
    match weight:
        case Tensor():
            return weight.clone()
        case ScaledWeight():
            return ScaledWeight(weight.q.clone(), weight.scales.clone())
        case W4A8Weight():
            return W4A8Weight(clone(weight.shuffled))
    return clone(weight)


def plain_weight(weight: Any) -> Tensor:
    """fp32"""
    match weight:
        case Tensor():
            return weight.float()
        case ScaledWeight():
            return weight.q.float() * weight.scales[:, None]
        case W4A8Weight():
            w = weight.shuffled
            quads = w.words.unflatten(2, (-1, 4))  # of which word i has planes 2 i and 2 i + 1
            octets = 8 * torch.arange(4, device=w.words.device)
            values = torch.stack([quads[..., p // 2, None] >> octets + p % 2 * 4 & 15 for p in range(8)], 2)
            q = values.flatten(1)[:, : w.num_inputs].float() - 8
            scales = w.scales.transpose(0, 1).reshape(w.num_outputs, -1).contiguous().view(torch.float16)
            return q * scales.float().repeat_interleave(w.group, 1)[:, : w.num_inputs]
    return dequantize(weight, torch.float16).float()


# name: how weights are made, how rows are given, the call that the engine makes
FORMATS: dict[str, tuple[Callable[[int, int], Any], Callable[[Tensor], Any], Callable[..., Tensor]]] = {
    "bf16": (lambda N, K: torch.randn(N, K, device="cuda", dtype=BF16) / 64, lambda x: x, linear),
    "fp8": (lambda N, K: random_scaled(N, K, FP8, False), lambda x: quantize_rows(x, FP8), scaled_linear),
    "int8": (
        lambda N, K: random_scaled(N, K, torch.int8, False),
        lambda x: quantize_rows(x, torch.int8),
        scaled_linear,
    ),
    "int4": (random_int4, lambda x: x, grouped_linear),
    "w8a16": (random_w8a16, lambda x: x, grouped_linear),  # the head's
    "w4a8": (random_w4a8, lambda x: quantize_rows(x, FP8), w4a8_linear),
    "int4_g32": (partial(random_int4, group=32), lambda x: x, grouped_linear),
    "int4_g64": (partial(random_int4, group=64), lambda x: x, grouped_linear),
    **{
        name.lower(): (partial(repeated_weight, name), lambda x: x, grouped_linear)
        for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    },
}
SWEPT = ("int4", "w4a8", "int8", "q4_k", "q6_k")


def nbytes(weight: Any) -> int:
    return int(weight.nbytes)


def copies_of(kind: str, shape: str) -> list[Any]:
    first = FORMATS[kind][0](*SHAPES[shape])
    return [first] + [copy_of(first) for _ in range(copies(nbytes(first)) - 1)]


def expected(x: Any, weight: Any) -> Tensor:
    floats = x.q.float() * x.scales if isinstance(x, QuantizedRows) else x.float()
    return F.linear(floats, plain_weight(weight))


# -- the table --------------------------------------------------------------------------------------------------------


def measure(kind: str, shape: str, sizes: Sequence[int], tickets: Tensor) -> Iterator[dict[str, Any]]:
    weights, (N, K) = copies_of(kind, shape), SHAPES[shape]
    _, prepare, call = FORMATS[kind]
    compile_all(partial(call, prepare(rows(M, K)), weights[0], tickets=tickets) for M in sizes)
    for M in sizes:
        x = prepare(rows(M, K))
        seconds = seconds_a_call([partial(call, x, w, tickets=tickets) for w in weights])
        error = relative_error(call(x, weights[0], tickets=tickets), expected(x, weights[0]))
        yield {
            "format": kind, "shape": shape, "rows": M, "us": round(seconds * 1e6, 2),
            "TB/s": round(nbytes(weights[0]) / seconds / 1e12, 3), "TFLOP/s": round(2 * M * N * K / seconds / 1e12, 1),
            "error": error,
        }  # fmt: skip


def cublas(shape: str, sizes: Sequence[int]) -> dict[int, float]:
    """Microseconds of `F.linear` in bf16."""
    weights = copies_of("bf16", shape)
    return {
        M: round(1e6 * seconds_a_call([partial(F.linear, rows(M, SHAPES[shape][1]), w) for w in weights]), 2)
        for M in sizes
    }


def run_table(kinds: Sequence[str], shapes: Sequence[str], sizes: Sequence[int]) -> list[dict[str, Any]]:
    ceilings, tickets, found = Ceilings(), new_tickets("cuda"), []
    for shape in shapes:
        beside = cublas(shape, sizes)
        for kind in kinds:
            for row in measure(kind, shape, sizes, tickets):
                row["cublas_us"] = beside[row["rows"]]
                found.append(row)
                wrong = "" if row["error"] < MAX_ERROR else f"  WRONG {row['error']:.1e}"
                line = f"{kind:8} {shape:8} M={row['rows']:<4} {row['us']:8.1f} us  {row['TB/s']:5.2f} TB/s"
                line += f"  {row['TFLOP/s']:6.1f} TFLOP/s  cuBLAS {row['cublas_us']:7.1f} us{wrong}"
                print(line, flush=True)
    print(
        f"\nall {len(shapes)} matrices, microseconds\n{'rows':>6}"
        + "".join(f"{kind:>9}" for kind in [*kinds, "cuBLAS"])
    )
    for M in sizes:
        of_rows = [row for row in found if row["rows"] == M]
        sums = [sum(row["us"] for row in of_rows if row["format"] == kind) for kind in kinds]
        sums.append(sum(row["cublas_us"] for row in of_rows if row["format"] == kinds[0]))
        print(f"{M:6}" + "".join(f"{total:9.1f}" for total in sums))
    print(f"copy {ceilings.bandwidth / 1e12:.2f} TB/s, bf16 GEMM {ceilings.rate / 1e12:.0f} TFLOP/s")
    return found


# -- the sweep --------------------------------------------------------------------------------------------------------

FEW = [Tile(32, 64, 4, 3, 2), Tile(32, 64, 4, 2, 4, 128), Tile(32, 64, 4, 2, 3), Tile(32, 128, 8, 2, 2, 128),
       Tile(32, 128, 8, 3, 1)]  # fmt: skip
MEDIUM = [Tile(64, 64, 4, 2, 3, 168), Tile(64, 64, 4, 2, 2), Tile(64, 64, 4, 3, 2), Tile(64, 128, 8, 2, 2, 128),
          Tile(64, 128, 8, 2, 1), Tile(64, 128, 8, 3, 1)]  # fmt: skip
MANY = [Tile(128, 128, 8, 2, 1), Tile(128, 128, 8, 3, 1), Tile(128, 64, 4, 2, 2), Tile(128, 256, 8, 2, 1), *MEDIUM[:4]]
FOLDS = [Tile(64, 64, 4, 2, 3, 168, True), Tile(64, 128, 8, 2, 2, 128, True), Tile(64, 128, 8, 2, 1, 0, True),
         Tile(128, 128, 8, 2, 1, 0, True), Tile(128, 64, 4, 2, 2, 0, True)]  # fmt: skip


def tiles_for(kind: str, M: int) -> list[Tile]:
    if kind in ("q4_k", "q6_k"):
        own = [] if M > 64 else [FEW[0], MEDIUM[2]]
        return own + [tile for tile in FOLDS if M > 64 or tile.block_m == 64] if M > 16 else FEW[:2]
    tiles = FEW if M <= 32 else MEDIUM if M <= 64 else MANY
    folded = [tile for tile in FOLDS if (M > 64) == (tile.block_m == 128)] if kind == "int4" and M > 32 else []
    return [*tiles, *folded, *([Tile(128, 128, 8, 4, 1)] if kind == "int8" and M > 64 else [])]


def configs_for(kind: str, M: int, N: int, K: int) -> list[Any]:
    """Each tile with the splits that should be best, and with twice and half as many."""
    found: dict[Any, None] = {}
    for tile in tiles_for(kind, M):
        programs, chunks = (
            -(-M // tile.block_m) * -(-N // tile.block_n),
            K // (128 if kind in ("int8", "q6_k") else 256),
        )
        chosen = best_splits(programs, chunks, tile.resident)
        for splits in {chosen, max(chosen // 2, 1), chosen * 2} & set(SPLITS):
            if kind == "int8":
                found[ScaledConfig(tile.block_m, min(tile.block_n, 128), splits, False, tile.warps, tile.stages)] = None
            else:
                sizes = tile.block_m, tile.block_n, splits, False, tile.warps, tile.stages, tile.registers, tile.fold
                found[GroupedConfig(*sizes)] = None
    return list(found)


def calls_for(kind: str, x: Any, weights: Sequence[Any], config: Any, tickets: Tensor) -> Calls:
    if isinstance(config, WideConfig):
        return [partial(wide_kernel, x, w, None, config, tickets) for w in weights]
    if kind == "int8":
        return [partial(scaled_kernel, x, w, None, BF16, config, tickets) for w in weights]
    if kind == "w4a8":
        return [partial(w4a8_kernel, x, w, None, BF16, config, tickets) for w in weights]
    return [partial(grouped_kernel, x, w, None, config, tickets) for w in weights]


def engine_config(kind: str, M: int, weight: Any) -> Any:
    if kind == "int8":
        return scaled_config(M, weight, batch_invariant=False)
    if kind == "w4a8":
        return w4a8_config(M, weight)
    return (wide_config(M, weight) if can_be_wide(weight) else None) or grouped_config(M, weight)


def sweep_case(
    kind: str, shape: str, M: int, weights: list[Any], tickets: Tensor, until: float, passed: set[int] | None = None
) -> dict[str, Any] | None:
    """Microseconds of every tile, the best first; None where time is up. `passed`: numbers of wide tiles, to take
    instead of others."""
    N, K = SHAPES[shape]
    x = FORMATS[kind][1](rows(M, K))
    truth, timings, wrong = expected(x, weights[0]), [], []
    chosen = engine_config(kind, M, weights[0])
    configs = configs_for(kind, M, N, K) if passed is None else wide_configs(M, N, K, passed)
    calls = {config: calls_for(kind, x, weights, config, tickets) for config in [chosen, *configs]}
    compile_all(captured[0] for captured in calls.values())
    for config, captured in calls.items():
        if time.monotonic() > until:
            return None
        try:
            error = relative_error(captured[0](), truth)  # type: ignore[arg-type]
            (wrong if not error < MAX_ERROR else timings).append(
                (1e6 * seconds_a_call(captured, rounds=3), list(config))
            )
        except Exception as reason:
            wrong.append((0.0, [*config, str(reason).splitlines()[0][:80]]))
    torch.cuda.synchronize()
    timings.sort()
    engine = next((us for us, config in timings if config == list(chosen)), None)
    others = {
        "engine_us": engine,
        "engine": list(chosen),
        "best": timings[: 4 if passed is None else 12],
        "failed": wrong,
    }
    if kind in ("int4", "q4_k", "q6_k") and M >= 128:
        others["dequantized_us"] = 1e6 * seconds_a_call([partial(dequantized, x, w) for w in weights], rounds=3)
    if kind == "int8" and M >= 128:
        others["cublas_us"] = 1e6 * seconds_a_call([partial(torch._int_mm, x.q, w.q.T) for w in weights], rounds=3)
    return {"format": kind, "shape": shape, "rows": M, **others}


def dequantized(x: Tensor, weight: GroupedWeight) -> Tensor:
    return F.linear(x, dequantize(weight, x.dtype))


def sweep_wide(shapes: Sequence[str], sizes: Sequence[int], out: Path, seconds: float) -> None:
    """Tables of the tiles that give right results, beside cuBLAS in bf16 and fp8 and what the engine calls."""
    until, tickets = time.monotonic() + seconds, new_tickets("cuda")
    passed = tiles_that_pass()
    threading.Timer(seconds + 20, partial(os._exit, 3)).start()  # a kernel that never ends
    for shape in shapes:
        weights, (N, K) = copies_of("int4", shape), SHAPES[shape]
        beside, fp8 = cublas(shape, sizes), cublas_fp8(shape, sizes)
        for M in sizes:
            case = sweep_case("int4", shape, M, weights, tickets, until, passed)
            if case is None:
                print(f"{seconds:.0f} s are over")
                os._exit(0)
            case |= {"cublas_us": beside[M], "cublas_fp8_us": fp8[M]}
            with out.open("a") as lines:
                lines.write(json.dumps(case) + "\n")
            print(f"\n{shape} {N} x {K}, {M} rows: cuBLAS bf16 {beside[M]:.1f} us, fp8 {fp8[M]:.1f}")
            engine, dequantized_us = case["engine_us"] or 0.0, case.get("dequantized_us", 0.0)
            print(f"  engine's kernel {engine:.1f} us {case['engine']}, dequantized {dequantized_us:.1f}")
            for us, config in case["best"]:
                rates = f"{nbytes(weights[0]) / us / 1e6:5.2f} TB/s {2 * M * N * K / us / 1e6:6.1f} TFLOP/s"
                print(f"  {us:7.1f} us {rates}  {config}", flush=True)
            for _, failed in case["failed"]:
                print(f"  failed: {failed}", flush=True)
    os._exit(0)


def cublas_fp8(shape: str, sizes: Sequence[int]) -> dict[int, float]:
    """Microseconds of `torch._scaled_mm` with scales of rows and outputs."""
    weights, found = copies_of("fp8", shape), {}
    for M in sizes:
        x = quantize_rows(rows(M, SHAPES[shape][1]), FP8)
        calls = [partial(_scaled_mm, x, w) for w in weights]
        found[M] = round(1e6 * seconds_a_call(calls, rounds=3), 2)
    return found


def _scaled_mm(x: QuantizedRows, w: ScaledWeight) -> Tensor:
    return torch._scaled_mm(x.q, w.q.T, scale_a=x.scales, scale_b=w.scales[None, :], out_dtype=BF16)


def sweep(kinds: Sequence[str], shapes: Sequence[str], sizes: Sequence[int], out: Path, seconds: float) -> None:
    until, tickets = time.monotonic() + seconds, new_tickets("cuda")
    done = {(row["format"], row["shape"], row["rows"]) for row in read_lines(out)}
    for kind in kinds:
        for shape in shapes:
            left = [M for M in sizes if (kind, shape, M) not in done]
            weights = copies_of(kind, shape) if left else []
            for M in left:
                case = sweep_case(kind, shape, M, weights, tickets, until)
                if case is None:
                    print(f"{seconds:.0f} s are over: start again with --out {out} to go on")
                    return
                with out.open("a") as lines:
                    lines.write(json.dumps(case) + "\n")
                print(json.dumps(case), flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_best(path: Path) -> None:
    for row in sorted(read_lines(path), key=lambda row: (row["format"], row["rows"], row["shape"])):
        us, config = row["best"][0] if row["best"] else (0.0, None)
        engine = f"{row['engine_us']:.1f}" if row["engine_us"] else "failed"
        print(f"{row['format']:5} M={row['rows']:<4} {row['shape']:8} best {us:7.1f} us {config}, engine {engine} us, "
              f"dequantized {row.get('dequantized_us', 0):.1f}, failed {len(row['failed'])}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=FORMATS, help="formats (default: all; of a sweep, those with tiles)"
    )
    parser.add_argument("--rows", nargs="+", type=int, help="M (default: 1 to 512; of a sweep, 32 to 512)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(LAYER))
    parser.add_argument("--sweep", action="store_true", help="try tiles instead of timing those chosen")
    parser.add_argument("--wide", action="store_true", help="of a sweep: only the kernel for many rows of int4")
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"), help="where a sweep writes, and goes on")
    parser.add_argument("--seconds", type=float, default=230.0, help="a sweep ends then")
    parser.add_argument("--best", type=Path, metavar="FILE", help="print what a sweep found")
    args = parser.parse_args()
    if args.best:
        print_best(args.best)
        return
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    if args.sweep and args.wide:
        sweep_wide(args.shapes, args.rows or (256, 128, 64, 32, 512), args.out, args.seconds)
        return
    if args.sweep:
        sweep(args.only or SWEPT, args.shapes, args.rows or (64, 128, 256, 32, 512), args.out, args.seconds)
        return
    table = run_table(args.only or list(FORMATS), args.shapes, args.rows or ROWS)
    print(
        json.dumps(
            {"benchmark": "gpu.matmuls", "machine": describe(), "gpu": torch.cuda.get_device_name(), "rows": table}
        )
    )


if __name__ == "__main__":
    main()
