"""Products with the matrices of Llama-3.1-8B on a GPU: correct on odd shapes, and how close to the speed of a copy.

    python -m benchmarks.gpu.linear                         checks, then one line a case
    python -m benchmarks.gpu.linear --only bf16 grouped     some of the families
    python -m benchmarks.gpu.linear --only stored           GGUF's types, as files have them
    python -m benchmarks.gpu.linear --sweep                 tries configurations, prints the best of each shape

A case is captured as a CUDA graph over as many copies of its weights as the cache cannot hold, as the layers of a
model are; the time is that of one call within it, launch gaps included."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks.gpu import linear_moe as moe
from benchmarks.gpu import linear_quantized as quantized
from benchmarks.gpu import linear_stored as stored
from benchmarks.gpu import linear_token as token
from benchmarks.gpu.measuring import Calls, Ceilings, check, copies, print_fastest, rows, run_all, seconds_a_call
from benchmarks.gpu.shapes import SHAPES, splits_to_try
from quire.ops.gpu.linear.gemv import MAX_GEMV_ROWS, GemvConfig, linear_gemv
from quire.ops.gpu.linear.linear import linear
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.linear.stream import StreamConfig, linear_stream

ROWS = (1, 2, 4, 8, 16, 32, 64)


def check_bf16() -> None:
    tickets = new_tickets("cuda")
    cases = product((1, 3, 17, 64, 130), ((96, 264), (4100, 4096), (264, 14336)))
    run_all(partial(check_case, M, N, K, tickets) for M, (N, K) in cases)
    if tickets.any():
        print("WRONG bf16: tickets are left")


def check_case(M: int, N: int, K: int, tickets: Tensor) -> None:
    x, w, bias = rows(M, K), rows(N, K), rows(1, N)[0]
    truth = F.linear(x.float(), w.float(), bias.float())
    for batch_invariant in (False, True):
        y = linear(x, w, bias, batch_invariant=batch_invariant, tickets=tickets)
        check(f"bf16 {M}x{N}x{K} invariant={batch_invariant}", y, truth, 4e-3)
    for count in {1, M // 2 + 1} - {M}:
        few = linear(x[:count], w, bias, batch_invariant=True, tickets=tickets)
        if not torch.equal(few, y[:count]):
            print(f"WRONG bf16 {N}x{K}: {count} rows differ from the same rows among {M}")


def matrices(N: int, K: int) -> list[Tensor]:
    """bf16, as many as the cache cannot hold."""
    return [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(copies(2 * N * K))]


def run_bf16(ceilings: Ceilings) -> None:
    tickets = new_tickets("cuda")
    for name, (N, K) in SHAPES.items():
        ws = matrices(N, K)
        for M in ROWS:
            x = rows(M, K)
            ways: dict[str, Calls] = {
                "chosen": [partial(linear, x, w, tickets=tickets) for w in ws],
                "invariant": [partial(linear, x, w, batch_invariant=True, tickets=tickets) for w in ws],
                "cublas": [partial(F.linear, x, w) for w in ws],
            }
            for way, calls in ways.items():
                print(ceilings.line(f"bf16 {name} M={M} {way}", seconds_a_call(calls), 2 * N * K, 2 * M * N * K))
    x, w = rows(2048, 4096), rows(28672, 4096)
    for way, invariant in (("chosen", False), ("invariant", True)):
        seconds = seconds_a_call([partial(linear, x, w, batch_invariant=invariant)] * 3)
        print(ceilings.line(f"bf16 gate_up M=2048 {way}", seconds, w.nbytes, 2 * 2048 * w.numel()))


def stream_configs(block_m: int, splits: Sequence[int]) -> Iterator[StreamConfig]:
    for block_n, block_k, count, stages in product((64, 128), (128, 256), splits, (3, 4, 6)):
        if 32 << 10 <= 2 * (block_n + block_m) * block_k * stages <= 220 << 10:
            yield StreamConfig(block_m, block_n, block_k, count, False, 4, stages)


def sweep_bf16() -> None:
    tickets = new_tickets("cuda")
    for name, (N, K) in SHAPES.items():
        ws = matrices(N, K)
        for M in (1, 2, 4, 16, 64):
            x = rows(M, K)
            calls: dict[str, Calls] = {
                str(c): [partial(linear_stream, x, w, None, c, tickets) for w in ws]
                for c in stream_configs(max(M, 16), splits_to_try(N, K))
            }
            for config in gemv_configs(M):
                calls[str(config)] = [partial(linear_gemv, x, w, None, config) for w in ws]
            print_fastest(f"bf16 {name} M={M}", 2 * N * K, calls)


def gemv_configs(M: int) -> Iterator[GemvConfig]:
    if M == 1:
        for block_n, block_k, warps, ahead in product((1, 2, 4, 8), (512, 1024, 2048), (4, 8), (1, 2, 3)):
            if 512 <= block_n * block_k // warps <= 2048:
                yield GemvConfig(block_n, block_k, warps, ahead)
    elif M <= MAX_GEMV_ROWS:
        for block_n, warps, ahead in product((2, 4, 8), (2, 4, 8), (1, 2)):
            yield GemvConfig(block_n, 256 * warps, warps, ahead)


# name: checks, times, sweep
FAMILIES: dict[str, tuple[Callable[[], None], Callable[[Ceilings], None], Callable[[], None]]] = {
    "bf16": (check_bf16, run_bf16, sweep_bf16),
    "grouped": (quantized.check_grouped, quantized.run_grouped, quantized.sweep_grouped),
    "scaled": (quantized.check_scaled, quantized.run_scaled, quantized.sweep_scaled),
    "stored": (stored.check_stored, stored.run_stored, stored.sweep_stored),
    "moe": (moe.check_moe, moe.run_moe, moe.sweep_moe),
    "token": (token.check_token, token.run_token, token.check_token),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--sweep", action="store_true", help="try configurations instead of timing those chosen")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    ceilings = Ceilings()
    for name in args.only:
        check_family, run, sweep = FAMILIES[name]
        started = time.monotonic()
        check_family()
        print(f"{name}: checked in {time.monotonic() - started:.0f} s", flush=True)
        if args.sweep:
            sweep()
        else:
            run(ceilings)


if __name__ == "__main__":
    main()
