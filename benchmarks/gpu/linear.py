"""Products with the matrices of Llama-3.1-8B on a GPU: correct on odd shapes, and how close to the speed of a copy.

    python -m benchmarks.gpu.linear                         checks, then one line a case
    python -m benchmarks.gpu.linear --only bf16 grouped     some of the families
    python -m benchmarks.gpu.linear --sweep                 tries configurations, prints the best of each shape

A case is captured as a CUDA graph over as many copies of its weights as the cache cannot hold, as the layers of a
model are; the time is that of one call within it, launch gaps included."""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from quire.ops.torch.kernels import linear as bf16
from quire.ops.torch.kernels import moe
from quire.ops.torch.kernels.linear_gemv import GemvConfig, linear_gemv
from quire.ops.torch.kernels.linear_splits import new_tickets
from quire.ops.torch.kernels.linear_stream import StreamConfig, linear_stream
from quire.ops.torch.kernels.moe import mixture
from quire.ops.torch.kernels.quant_dequantize import dequantize
from quire.ops.torch.kernels.quant_layout import GroupedWeight, pack_codebook4, pack_int4, pack_int8
from quire.ops.torch.kernels.quant_linear import GroupedConfig, grouped_kernel, grouped_linear
from quire.ops.torch.kernels.quant_rows import Quantized, quantize_rows
from quire.ops.torch.kernels.quant_scaled import ScaledConfig, ScaledWeight, scaled_kernel, scaled_linear

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


Calls = list[Callable[[], object]]


def print_fastest(name: str, nbytes: int, calls: dict[str, Calls], keep: int = 3) -> None:
    """The best of the configurations; one that does not compile or run is said and passed over."""
    found = []
    with ThreadPoolExecutor(8) as pool:  # compiling takes longest
        wait([pool.submit(captured[0]) for captured in calls.values()])
    torch.cuda.synchronize()
    for config, captured in calls.items():
        try:
            found.append((seconds_a_call(captured, rounds=3), config))
        except Exception as error:
            print(f"    failed: {config}: {str(error).splitlines()[0][:100]}")
    for seconds, config in sorted(found)[:keep]:
        print(f"best {name}: {nbytes / seconds / 1e12:.2f} TB/s {seconds * 1e6:.1f} us {config}", flush=True)


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


def matrices(N: int, K: int) -> list[Tensor]:
    """bf16, as many as the cache cannot hold."""
    return [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(copies(2 * N * K))]


def rows(M: int, K: int) -> Tensor:
    return torch.randn(M, K, device="cuda", dtype=torch.bfloat16)


def run_bf16(ceilings: Ceilings) -> None:
    tickets = new_tickets("cuda")
    for name, (N, K) in SHAPES.items():
        ws = matrices(N, K)
        for M in ROWS:
            x = rows(M, K)
            ways: dict[str, Calls] = {
                "chosen": [partial(bf16.linear, x, w, tickets=tickets) for w in ws],
                "invariant": [partial(bf16.linear, x, w, batch_invariant=True, tickets=tickets) for w in ws],
                "cublas": [partial(F.linear, x, w) for w in ws],
            }
            for way, calls in ways.items():
                print(ceilings.line(f"bf16 {name} M={M} {way}", seconds_a_call(calls), 2 * N * K, 2 * M * N * K))
    x, w = rows(2048, 4096), rows(28672, 4096)
    for way, invariant in (("chosen", False), ("invariant", True)):
        seconds = seconds_a_call([partial(bf16.linear, x, w, batch_invariant=invariant)] * 3)
        print(ceilings.line(f"bf16 gate_up M=2048 {way}", seconds, w.nbytes, 2 * 2048 * w.numel()))


def stream_configs(block_m: int, splits: Sequence[int]) -> Iterator[StreamConfig]:
    for block_n, block_k, count, stages in product((64, 128), (128, 256), splits, (3, 4, 6)):
        if 32 << 10 <= 2 * (block_n + block_m) * block_k * stages <= 220 << 10:
            yield StreamConfig(block_m, block_n, block_k, count, False, 4, stages)


def sweep_bf16() -> None:
    tickets = new_tickets("cuda")
    for name, (N, K) in SHAPES.items():
        ws = matrices(N, K)
        splits = sorted({max(bf16.num_splits(N, K) // 2, 1), bf16.num_splits(N, K), 2 * bf16.num_splits(N, K)})
        for M in (1, 16, 64):
            x = rows(M, K)
            calls: dict[str, Calls] = {
                str(c): [partial(linear_stream, x, w, None, c, tickets) for w in ws]
                for c in stream_configs(max(M, 16), splits)
            }
            if M == 1:
                for block_n, block_k, warps, stages in product((1, 2, 4, 8), (512, 1024, 2048), (2, 4, 8), (1, 3)):
                    if 512 <= block_n * block_k // warps <= 2048:
                        gemv = GemvConfig(block_n, block_k, warps, stages)
                        calls[str(gemv)] = [partial(linear_gemv, x, w, None, gemv) for w in ws]
            print_fastest(f"bf16 {name} M={M}", 2 * N * K, calls)


# -- codes in groups --------------------------------------------------------------------------------------------------


def random_grouped(bits: int, N: int, K: int, group: int, offset: bool, table: bool, width: int = 0) -> GroupedWeight:
    scales = torch.rand(N, K // group, device="cuda").half() / 64
    offsets = torch.randn(N, K // group, device="cuda").half() / 64 if offset else None
    if bits == 8:
        codes = torch.randint(-128, 128, (N, K), device="cuda", dtype=torch.int8)
        return pack_int8(codes, scales, offsets, width)
    codes = torch.randint(0, 16, (N, K), device="cuda", dtype=torch.uint8)
    if table:
        return pack_codebook4(codes, scales, NF4, width)
    return pack_int4(codes, scales, offsets, 0 if offset else 8, width)


GROUPED = {  # bits, group (0: the row), offsets, codebook
    "int4 g128": (4, 128, False, False),
    "int4 g128 offsets": (4, 128, True, False),
    "int4 g32": (4, 32, False, False),
    "nf4 g64": (4, 64, False, True),
    "int8 g32": (8, 32, False, False),
    "int8 rows": (8, 0, False, False),
}
NF4 = [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]


def check_grouped() -> None:
    tickets = new_tickets("cuda")
    for (kind, (bits, group, offset, table)), (N, K) in product(
        GROUPED.items(), ((96, 512), (4100, 4096), (70, 14336))
    ):
        weight = random_grouped(bits, N, K, group or K, offset, table)
        w = dequantize(weight, torch.bfloat16).float()
        codes_only = dequantize(weight, torch.float16).float()
        check(f"{kind} {N}x{K} bf16 and fp16 written out", w, codes_only, 4e-3)
        for M in (1, 3, 17, 64, 130, 300):
            x = rows(M, K)
            truth = F.linear(x.float(), codes_only)
            check(f"{kind} M={M} {N}x{K}", grouped_linear(x, weight, tickets=tickets), truth, 5e-3)
            whole = grouped_linear(x, weight, batch_invariant=True, tickets=tickets)
            check(f"{kind} M={M} {N}x{K} invariant", whole, truth, 5e-3)
            check(f"{kind} M={M} {N}x{K} fp16", grouped_linear(x.half(), weight, tickets=tickets), truth, 2e-3)
            if not torch.equal(grouped_linear(x[:1], weight, batch_invariant=True, tickets=tickets), whole[:1]):
                print(f"WRONG {kind} {N}x{K}: one row differs from the same among {M}")
    if tickets.any():
        print("WRONG grouped: tickets are left")


def run_grouped(ceilings: Ceilings) -> None:
    tickets = new_tickets("cuda")
    for kind, (bits, group, offset, table) in GROUPED.items():
        shapes = SHAPES if kind == "int4 g128" else {"gate_up": SHAPES["gate_up"]}
        for name, (N, K) in shapes.items():
            first = random_grouped(bits, N, K, group or K, offset, table)
            weights = [first] + [clone(first) for _ in range(copies(first.nbytes) - 1)]
            for M in (1, 4, 16, 64):
                x = rows(M, K)
                seconds = seconds_a_call([partial(grouped_linear, x, w, tickets=tickets) for w in weights])
                print(ceilings.line(f"{kind} {name} M={M}", seconds, first.nbytes, 2 * M * N * K))
    N, K = SHAPES["gate_up"]
    weight = random_grouped(4, N, K, 128, False, False)
    seconds = seconds_a_call([partial(dequantize, weight, torch.bfloat16)] * 3)
    print(ceilings.line("int4 g128 gate_up written out", seconds, weight.nbytes + 2 * N * K, 0))
    for M in (128, 256, 512, 2048):
        x = rows(M, K)
        ways: dict[str, Calls] = {
            "kernel": [partial(grouped_linear, x, weight, batch_invariant=True)] * 3,
            "written out": [lambda x=x: F.linear(x, dequantize(weight, torch.bfloat16))] * 3,
        }
        for way, calls in ways.items():
            print(ceilings.line(f"int4 g128 gate_up M={M} {way}", seconds_a_call(calls), 0, 2 * M * N * K))


def clone(weight: GroupedWeight) -> GroupedWeight:
    offsets = None if weight.offsets is None else weight.offsets.clone()
    return replace(weight, words=weight.words.clone(), scales=weight.scales.clone(), offsets=offsets)


def sweep_grouped() -> None:
    tickets = new_tickets("cuda")
    cases = [("int4 g128", shape) for shape in SHAPES] + [("nf4 g64", "gate_up"), ("int8 rows", "gate_up")]
    for kind, name in cases:
        (bits, group, offset, table), (N, K) = GROUPED[kind], SHAPES[name]
        splits = sorted({max(bf16.num_splits(N, K) // 2, 1), bf16.num_splits(N, K), 2 * bf16.num_splits(N, K)})
        for width in (64, 32, 16):
            first = random_grouped(bits, N, K, group or K, offset, table, width)
            weights = [first] + [clone(first) for _ in range(copies(first.nbytes) - 1)]
            for M in (1, 16, 64):
                x = rows(M, K)
                configs = [
                    GroupedConfig(max(M, 16), block_n, count, False, warps, stages)
                    for block_n, warps, count, stages in product((64, 128), (4, 8), splits, (2, 3, 4))
                    if (block_n * width * 4 + 2 * max(M, 16) * first.chunk) * stages <= 220 << 10
                    and (block_n, warps) != (64, 8)
                ]
                calls = {str(c): [partial(grouped_kernel, x, w, None, c, tickets) for w in weights] for c in configs}
                print_fastest(f"{kind} {name} width={width} M={M}", first.nbytes, calls, keep=2)


# -- 8-bit activations ------------------------------------------------------------------------------------------------


def random_scaled(N: int, K: int, dtype: torch.dtype, by_blocks: bool) -> ScaledWeight:
    if by_blocks:
        scales = torch.rand(-(-N // 128), -(-K // 128), device="cuda")
        return ScaledWeight((torch.randn(N, K, device="cuda") * 8).to(dtype), scales)
    return ScaledWeight((torch.randn(N, K, device="cuda") * 8).to(dtype), torch.rand(N, device="cuda"))


def plain_scaled(x: Quantized, weight: ScaledWeight) -> Tensor:
    N, K = weight.codes.shape
    if not weight.by_blocks:
        return (x.codes.float() * x.scales) @ (weight.codes.float() * weight.scales[:, None]).T
    blocks = weight.scales.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return (x.codes.float() * x.scales.repeat_interleave(128, 1)[:, :K]) @ (weight.codes.float() * blocks).T


SCALED = {
    "fp8": (torch.float8_e4m3fn, False),
    "fp8 blocks": (torch.float8_e4m3fn, True),
    "int8": (torch.int8, False),
}


def check_scaled() -> None:
    tickets = new_tickets("cuda")
    for (kind, (dtype, by_blocks)), (N, K) in product(SCALED.items(), ((96, 512), (4100, 4096), (128, 14336))):
        weight = random_scaled(N, K, dtype, by_blocks)
        for M in (1, 3, 17, 64, 130):
            x = quantize_rows(rows(M, K), dtype, 128 if by_blocks else 0)
            truth = plain_scaled(x, weight)
            check(f"{kind} M={M} {N}x{K}", scaled_linear(x, weight, tickets=tickets), truth, 4e-3)
            whole = scaled_linear(x, weight, batch_invariant=True, tickets=tickets)
            check(f"{kind} M={M} {N}x{K} invariant", whole, truth, 4e-3)
            one = scaled_linear(Quantized(*(t[:1] for t in x)), weight, batch_invariant=True, tickets=tickets)
            if not torch.equal(one, whole[:1]):
                print(f"WRONG {kind} {N}x{K}: one row differs from the same among {M}")
    if tickets.any():
        print("WRONG scaled: tickets are left")


def run_scaled(ceilings: Ceilings) -> None:
    tickets = new_tickets("cuda")
    for kind, (dtype, by_blocks) in SCALED.items():
        for name, (N, K) in SHAPES.items():
            weights = [random_scaled(N, K, dtype, by_blocks) for _ in range(copies(N * K))]
            for M in (1, 4, 16, 64) if kind == "fp8" else (1, 64):
                x = quantize_rows(rows(M, K), dtype, 128 if by_blocks else 0)
                seconds = seconds_a_call([partial(scaled_linear, x, w, tickets=tickets) for w in weights])
                print(ceilings.line(f"{kind} {name} M={M}", seconds, N * K, 2 * M * N * K))
        N, K = SHAPES["gate_up"]
        weight = random_scaled(N, K, dtype, by_blocks)
        for M in (128, 512, 2048):
            x = quantize_rows(rows(M, K), dtype, 128 if by_blocks else 0)
            ways: dict[str, Calls] = {
                "chosen": [partial(scaled_linear, x, weight)] * 3,
                "invariant": [partial(scaled_linear, x, weight, batch_invariant=True)] * 3,
            }
            if kind == "fp8":
                ways["fast sums"] = [
                    partial(
                        torch._scaled_mm,
                        x.codes,
                        weight.codes.T,
                        scale_a=x.scales,
                        scale_b=weight.scales[None],
                        out_dtype=torch.bfloat16,
                        use_fast_accum=True,
                    )
                ] * 3
            if by_blocks:
                ways["torch by blocks"] = [
                    partial(
                        torch._scaled_mm,
                        x.codes,
                        weight.codes.T,
                        scale_a=x.scales.T.contiguous().T,
                        scale_b=weight.scales.T,
                        out_dtype=torch.bfloat16,
                    )
                ] * 3
            for way, calls in ways.items():
                try:
                    print(ceilings.line(f"{kind} gate_up M={M} {way}", seconds_a_call(calls), 0, 2 * M * N * K))
                except Exception as error:
                    print(f"    failed: {kind} M={M} {way}: {str(error).splitlines()[0][:150]}")


def sweep_scaled() -> None:
    tickets = new_tickets("cuda")
    for kind, name in [("fp8", shape) for shape in SHAPES] + [("fp8 blocks", "gate_up"), ("int8", "gate_up")]:
        (dtype, by_blocks), (N, K) = SCALED[kind], SHAPES[name]
        weights = [random_scaled(N, K, dtype, by_blocks) for _ in range(copies(N * K))]
        splits = sorted({max(bf16.num_splits(N, K) // 2, 1), bf16.num_splits(N, K), 2 * bf16.num_splits(N, K)})
        for M in (1, 16, 64):
            x = quantize_rows(rows(M, K), dtype, 128 if by_blocks else 0)
            configs = [
                ScaledConfig(max(M, 16), block_n, count, False, 4, stages)
                for block_n, count, stages in product((64, 128), splits, (3, 4, 6, 8))
            ]
            calls = {
                str(c): [partial(scaled_kernel, x, w, None, torch.bfloat16, c, tickets) for w in weights]
                for c in configs
            }
            print_fastest(f"{kind} {name} M={M}", N * K, calls, keep=2)


# -- mixtures of experts ----------------------------------------------------------------------------------------------

MIXTURES = {"Mixtral-8x7B": (8, 2, 4096, 14336), "Qwen3-30B-A3B": (128, 8, 2048, 768)}  # E, k, H, I


def random_routes(T: int, k: int, E: int) -> tuple[Tensor, Tensor]:
    weights, ids = torch.randn(T, E, device="cuda").softmax(-1).topk(k)
    return ids.int(), weights


def plain_mixture(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """In fp32, expert by expert."""
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(gate_up)):
        weight = torch.where(ids == expert, weights, 0.0).sum(1)
        gate, up = (x.float() @ gate_up[expert].float().T).chunk(2, dim=1)
        out += weight[:, None] * ((F.silu(gate) * up) @ down[expert].float().T)
    return out


def check_mixtures() -> None:
    for E, k, H, intermediate in ((8, 2, 520, 264), (60, 4, 512, 128)):
        gate_up = torch.randn(E, 2 * intermediate, H, device="cuda").bfloat16() / 16
        down = torch.randn(E, H, intermediate, device="cuda").bfloat16() / 16
        for T in (1, 3, 17, 200, 3000):
            x, (ids, weights) = rows(T, H), random_routes(T, k, E)
            y = mixture(x, ids, weights, gate_up, down)
            check(f"mixture E={E} T={T}", y, plain_mixture(x, ids, weights, gate_up, down), 1e-2)
            if not torch.equal(mixture(x[:1], ids[:1], weights[:1], gate_up, down), y[:1]):
                print(f"WRONG mixture E={E}: one token differs from the same among {T}")


def run_mixtures(ceilings: Ceilings) -> None:
    for name, (E, k, H, intermediate) in MIXTURES.items():
        layers = 2 if E == 8 else 6
        gate_ups = [torch.randn(E, 2 * intermediate, H, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        downs = [torch.randn(E, H, intermediate, device="cuda", dtype=torch.bfloat16) for _ in range(layers)]
        for T in (1, 4, 16, 64, 256, 2048, 8192):
            x, (ids, weights) = rows(T, H), random_routes(T, k, E)
            calls = [partial(mixture, x, ids, weights, g, d) for g, d in zip(gate_ups, downs, strict=True)]
            expert_weights = 3 * H * intermediate
            nbytes = 2 * expert_weights * len(ids.unique())
            line = ceilings.line(f"{name} T={T}", seconds_a_call(calls), nbytes, 2 * T * k * expert_weights)
            print(line, flush=True)


def sweep_mixtures() -> None:
    for (name, (E, k, H, intermediate)), T in product(MIXTURES.items(), (1, 16, 2048)):
        gate_up = torch.randn(E, 2 * intermediate, H, device="cuda", dtype=torch.bfloat16)
        down = torch.randn(E, H, intermediate, device="cuda", dtype=torch.bfloat16)
        x, (ids, weights) = rows(T, H), random_routes(T, k, E)
        block, found = moe.tile_block(T * k, E), []
        kept = moe.CONFIGS[block]
        for config in product((64, 128), (64, 128), (4, 8), (3, 4, 5)):
            moe.CONFIGS[block] = config
            try:
                found.append((seconds_a_call([partial(mixture, x, ids, weights, gate_up, down)] * 3, 3), config))
            except Exception as error:
                print(f"    failed: {config}: {str(error).splitlines()[0][:100]}")
        moe.CONFIGS[block] = kept
        for seconds, config in sorted(found)[:2]:
            print(f"best {name} T={T} block={block}: {seconds * 1e6:.1f} us {config}", flush=True)


FAMILIES: dict[str, tuple[Callable[[], None], Callable[[Ceilings], None], Callable[[], None]]] = {
    "bf16": (check_bf16, run_bf16, sweep_bf16),
    "grouped": (check_grouped, run_grouped, sweep_grouped),
    "scaled": (check_scaled, run_scaled, sweep_scaled),
    "mixtures": (check_mixtures, run_mixtures, sweep_mixtures),
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
