"""Times of captured calls, what the device can do at most, and whether results are right."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

Calls = list[Callable[[], object]]
UNCACHED = 256 << 20  # bytes of weights that do not fit the second-level cache
THREADS = 8  # that compile kernels


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
    """Bytes a second, read and written, of a kernel that copies: what `copy_` becomes in a graph is slower."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_a_call([lambda: torch.bitwise_not(source, out=target)] * 5)


def product_rate() -> float:
    """bf16 operations a second of a large GEMM."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_a_call([lambda: a @ b] * 5)


class Ceilings:
    def __init__(self) -> None:
        self.bandwidth, self.rate = copy_bandwidth(), product_rate()
        print(f"ceilings: copy {self.bandwidth / 1e12:.2f} TB/s, bf16 GEMM {self.rate / 1e12:.0f} TFLOP/s")

    def line(self, name: str, seconds: float, nbytes: int, operations: int) -> str:
        """The share is of the nearer ceiling."""
        bandwidth, rate = nbytes / seconds, operations / seconds
        share = max(bandwidth / self.bandwidth, rate / self.rate)
        return (
            f"{name:44} {seconds * 1e6:9.1f} us  {bandwidth / 1e12:5.2f} TB/s  {rate / 1e12:6.1f} TFLOP/s  {share:4.0%}"
        )


def print_fastest(name: str, nbytes: int, calls: dict[str, Calls], keep: int = 3) -> None:
    """The best of the configurations; one that does not compile or run is said and passed over."""
    timings = []
    compile_all(captured[0] for captured in calls.values())
    for config, captured in calls.items():
        try:
            timings.append((seconds_a_call(captured, rounds=3), config))
        except Exception as error:
            print(f"    failed: {config}: {str(error).splitlines()[0][:100]}")
    for seconds, config in sorted(timings)[:keep]:
        print(f"best {name}: {nbytes / seconds / 1e12:.2f} TB/s {seconds * 1e6:.1f} us {config}", flush=True)


def compile_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call each once, several at a time: compiling takes longest. Errors will be seen when the call is measured."""
    with ThreadPoolExecutor(THREADS) as pool:
        for call in calls:
            pool.submit(call)
    torch.cuda.synchronize()


def run_all(jobs: Iterable[Callable[[], object]]) -> None:
    """The same for checks, whose errors are to be seen at once."""
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(job) for job in jobs]:
            done.result()


def relative_error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth.double()).norm() / truth.double().norm())


def check(name: str, y: Tensor, truth: Tensor, bound: float) -> None:
    error = relative_error(y, truth)
    if not error <= bound:
        print(f"WRONG {name}: relative error {error:.2e}, at most {bound:.0e} expected")


def rows(M: int, K: int) -> Tensor:
    return torch.randn(M, K, device="cuda", dtype=torch.bfloat16)
