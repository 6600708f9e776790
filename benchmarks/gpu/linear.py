"""Products with the matrices of Llama-3.1-8B on a GPU: correct on odd shapes, and how close to the speed of a copy.

    python -m benchmarks.gpu.linear                         checks, then one line a case
    python -m benchmarks.gpu.linear --only bf16 int4        some of the families
    python -m benchmarks.gpu.linear --sweep                 tries configurations, prints the best of each shape

A case is captured as a CUDA graph over as many copies of its weights as the cache cannot hold, as the layers of a
model are; the time is that of one call within it, launch gaps included."""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from quire.ops.torch.kernels import linear as bf16
from quire.ops.torch.kernels.linear_gemv import GemvConfig, linear_gemv
from quire.ops.torch.kernels.linear_splits import new_tickets
from quire.ops.torch.kernels.linear_stream import StreamConfig, linear_stream

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}
ROWS = (1, 2, 4, 8, 16, 32, 64)
UNCACHED = 256 << 20  # bytes of weights that do not fit the second-level cache


# -- measuring --------------------------------------------------------------------------------------------------------


def seconds_a_call(calls: Sequence[Callable[[], object]], rounds: int = 7) -> float:
    """The calls as one CUDA graph, replayed: the median of the rounds, divided by the number of calls."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def copies(nbytes: int) -> int:
    return max(2, min(-(-UNCACHED // nbytes), 64))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy on the device."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_a_call([lambda: target.copy_(source)] * 5)


def product_rate() -> float:
    """bf16 operations a second of a large product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_a_call([lambda: a @ b] * 5)


class Ceilings:
    def __init__(self) -> None:
        self.bandwidth, self.rate = copy_bandwidth(), product_rate()
        print(f"ceilings: copy {self.bandwidth / 1e12:.2f} TB/s, bf16 product {self.rate / 1e12:.0f} TFLOP/s")

    def line(self, name: str, seconds: float, nbytes: int, operations: int) -> str:
        """The share is of the nearer ceiling."""
        bandwidth, rate = nbytes / seconds, operations / seconds
        share = max(bandwidth / self.bandwidth, rate / self.rate)
        return (
            f"{name:44} {seconds * 1e6:9.1f} us  {bandwidth / 1e12:5.2f} TB/s  {rate / 1e12:6.1f} TFLOP/s  {share:4.0%}"
        )


def fastest(calls: dict[str, Callable[[], Sequence[Callable[[], object]]]], keep: int = 3) -> list[tuple[float, str]]:
    """The best of the configurations; one that does not compile or run is said and passed over."""
    found = []
    for name, make in calls.items():
        try:
            found.append((seconds_a_call(make(), rounds=3), name))
        except Exception as error:
            print(f"    failed: {name}: {str(error).splitlines()[0][:100]}")
    return sorted(found)[:keep]


def relative_error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth.double()).norm() / truth.double().norm())


def check(name: str, y: Tensor, truth: Tensor, bound: float) -> None:
    error = relative_error(y, truth)
    if not error <= bound:
        print(f"WRONG {name}: relative error {error:.2e}, at most {bound:.0e} expected")


# -- bf16 -------------------------------------------------------------------------------------------------------------


def check_bf16() -> None:
    tickets = new_tickets("cuda")
    for M, N, K in product((1, 3, 17, 64, 130), (96, 4096, 4100), (264, 4096, 14336)):
        x, w = torch.randn(M, K, device="cuda").bfloat16(), torch.randn(N, K, device="cuda").bfloat16()
        bias = torch.randn(N, device="cuda").bfloat16()
        truth = F.linear(x.float(), w.float(), bias.float())
        for batch_invariant in (False, True):
            y = bf16.linear(x, w, bias, batch_invariant=batch_invariant, tickets=tickets)
            check(f"bf16 {M}x{N}x{K} invariant={batch_invariant}", y, truth, 4e-3)
        for count in {1, M // 2 + 1} - {M}:
            few = bf16.linear(x[:count], w, bias, batch_invariant=True, tickets=tickets)
            if not torch.equal(few, y[:count]):
                print(f"WRONG bf16 {N}x{K}: {count} rows differ from the same rows among {M}")
    if tickets.any():
        print("WRONG bf16: tickets are left")


def run_bf16(ceilings: Ceilings) -> None:
    tickets = new_tickets("cuda")
    for name, (N, K) in SHAPES.items():
        ws = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(copies(2 * N * K))]
        for M in ROWS:
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            ways: dict[str, Callable[[Tensor], Tensor]] = {
                "chosen": lambda w, x=x: bf16.linear(x, w, tickets=tickets),
                "invariant": lambda w, x=x: bf16.linear(x, w, batch_invariant=True, tickets=tickets),
                "cublas": lambda w, x=x: F.linear(x, w),
            }
            for way, call in ways.items():
                seconds = seconds_a_call([lambda w=w, call=call: call(w) for w in ws])
                print(ceilings.line(f"bf16 {name} {N}x{K} M={M} {way}", seconds, 2 * N * K, 2 * M * N * K))
    x = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(28672, 4096, device="cuda", dtype=torch.bfloat16)
    for way, invariant in (("chosen", False), ("invariant", True)):
        seconds = seconds_a_call([lambda invariant=invariant: bf16.linear(x, w, batch_invariant=invariant)] * 3)
        print(ceilings.line(f"bf16 gate_up M=2048 {way}", seconds, w.nbytes, 2 * 2048 * w.numel()))


def stream_configs(block_m: int) -> Iterator[StreamConfig]:
    for block_n, block_k, splits, stages in product((64, 128), (64, 128, 256), (1, 2, 4), (3, 4, 5, 6, 8)):
        if 2 * (block_n + block_m) * block_k * stages <= 220 << 10:
            yield StreamConfig(block_m, block_n, block_k, splits, False, 4, stages)


def sweep_bf16() -> None:
    tickets = new_tickets("cuda")
    for name, (N, K) in SHAPES.items():
        ws = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(copies(2 * N * K))]
        for M in (1, 16, 64):
            x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
            calls: dict[str, Callable[[], Sequence[Callable[[], object]]]] = {}
            if M == 1:
                for block_n, block_k, warps, stages in product((1, 2, 4, 8), (512, 1024, 2048), (2, 4, 8), (1, 3)):
                    if 512 <= block_n * block_k // warps <= 2048:
                        gemv = GemvConfig(block_n, block_k, warps, stages)
                        calls[str(gemv)] = lambda c=gemv, x=x: [lambda w=w: linear_gemv(x, w, None, c) for w in ws]
            for config in stream_configs(max(M, 16)):
                if bf16.num_splits(N, K) // 2 <= config.splits <= 2 * bf16.num_splits(N, K):
                    calls[str(config)] = lambda c=config, x=x: [
                        lambda w=w: linear_stream(x, w, None, c, tickets) for w in ws
                    ]
            for seconds, config_name in fastest(calls):
                print(f"best bf16 {name} M={M}: {2 * N * K / seconds / 1e12:.2f} TB/s {config_name}", flush=True)


FAMILIES: dict[str, tuple[Callable[[], None], Callable[[Ceilings], None], Callable[[], None]]] = {
    "bf16": (check_bf16, run_bf16, sweep_bf16),
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
        check_family()
        print(f"{name}: checked", flush=True)
        if args.sweep:
            sweep()
        else:
            run(ceilings)


if __name__ == "__main__":
    main()
