"""GEMMs with quantized weights: groups with 16-bit activations, and 8 bits on both sides."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.measuring import Calls, Ceilings, check, copies, print_fastest, rows, run_all, seconds_a_call
from benchmarks.gpu.shapes import SHAPES, splits_to_try
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.grouped import grouped_kernel, grouped_linear
from quire.ops.gpu.linear.grouped_config import GroupedConfig
from quire.ops.gpu.linear.grouped_gemv import GroupedGemvConfig, can_gemv, grouped_gemv, x_group
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int4, pack_int8
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.linear.scaled import ScaledConfig, ScaledWeight, scaled_kernel, scaled_linear
from quire.ops.gpu.linear.scaled_gemv import ScaledGemvConfig, scaled_gemv
from quire.ops.gpu.linear.split_k import new_tickets

FP8 = torch.float8_e4m3fn

# -- in groups ---------------------------------------------------------------------------------------------------------


def random_grouped(bits: int, N: int, K: int, group: int, offset: bool, table: bool, width: int = 0) -> GroupedWeight:
    scales = torch.rand(N, K // group, device="cuda").half() / 64
    offsets = torch.randn(N, K // group, device="cuda").half() / 64 if offset else None
    if bits == 8:
        q = torch.randint(-128, 128, (N, K), device="cuda", dtype=torch.int8)
        return pack_int8(q, scales, offsets, width)
    q = torch.randint(0, 16, (N, K), device="cuda", dtype=torch.uint8)
    if table:
        return pack_codebook4(q, scales, NF4, width)
    return pack_int4(q, scales, offsets, 0 if offset else 8, width)


GROUPED = {  # bits, group (0: the row), offsets, codebook
    "int4 g128": (4, 128, False, False),
    "int4 g128 offsets": (4, 128, True, False),
    "int4 g64": (4, 64, False, False),
    "int4 g32": (4, 32, False, False),
    "int4 g32 offsets": (4, 32, True, False),
    "nf4 g64": (4, 64, False, True),
    "int8 g32": (8, 32, False, False),
    "int8 rows": (8, 0, False, False),
}
NF4 = [-1.0, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0.0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1.0]


def check_grouped() -> None:
    tickets = new_tickets("cuda")
    cases = product(GROUPED, ((4100, 1024), (70, 3584)))
    run_all(partial(check_grouped_case, kind, N, K, tickets) for kind, (N, K) in cases)
    if tickets.any():
        print("WRONG grouped: tickets are left")


def check_products(name: str, weight: GroupedWeight, w: Tensor, sizes: Sequence[int], tickets: Tensor) -> None:
    """Products of that many rows beside those with `w`, which is the weight in fp32."""
    for M in sizes:
        x = rows(M, weight.num_inputs)
        truth = F.linear(x.float(), w)
        check(f"{name} M={M}", grouped_linear(x, weight, tickets=tickets), truth, 5e-3)
        whole = grouped_linear(x, weight, batch_invariant=True, tickets=tickets)
        check(f"{name} M={M} invariant", whole, truth, 5e-3)
        if not torch.equal(grouped_linear(x[:1], weight, batch_invariant=True, tickets=tickets), whole[:1]):
            print(f"WRONG {name}: one row differs from the same among {M}")


def check_grouped_case(kind: str, N: int, K: int, tickets: Tensor) -> None:
    bits, group, offset, table = GROUPED[kind]
    weight = random_grouped(bits, N, K, group or K, offset, table)
    w = dequantize(weight, torch.float16).float()
    check(f"{kind} {N}x{K} bf16 and fp16 written out", dequantize(weight, torch.bfloat16), w, 4e-3)
    check_products(f"{kind} {N}x{K}", weight, w, (1, 17, 130, 300), tickets)
    half = rows(1, K).half()
    check(f"{kind} {N}x{K} fp16", grouped_linear(half, weight, tickets=tickets), F.linear(half.float(), w), 2e-3)


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
    """Its tensors anew, so that they are not in the cache."""
    names = ("words", "high", "scales", "offsets", "super_scales")
    tensors = {name: getattr(weight, name) for name in names}
    return replace(weight, **{name: None if t is None else t.clone() for name, t in tensors.items()})


def sweep_grouped_row() -> None:
    for name, (N, K) in SHAPES.items():
        first = random_grouped(4, N, K, 128, True, False)
        assert can_gemv(first)
        weights = [first] + [clone(first) for _ in range(copies(first.nbytes) - 1)]
        x = quantize_rows(rows(1, K), torch.int16, x_group(first))
        configs = [
            GroupedGemvConfig(block_n, warps, depth)
            for warps, outputs, depth in product((8, 16), (2, 4, 8), (1, 2, 4))
            if (block_n := outputs * warps) and outputs * depth <= 16
        ]
        calls: dict[str, Calls] = {
            str(c): [partial(grouped_gemv, x, w, None, c, torch.bfloat16, True) for w in weights] for c in configs
        }
        print_fastest(f"int4 g128 {name} one row", first.nbytes, calls)


def sweep_grouped() -> None:
    sweep_grouped_row()
    tickets = new_tickets("cuda")
    cases = [("int4 g128", shape) for shape in SHAPES] + [("nf4 g64", "gate_up"), ("int8 rows", "gate_up")]
    for kind, name in cases:
        (bits, group, offset, table), (N, K) = GROUPED[kind], SHAPES[name]
        splits = splits_to_try(N, K)
        for width in (64, 32):
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


def plain_scaled(x: QuantizedRows, weight: ScaledWeight) -> Tensor:
    N, K = weight.q.shape
    if not weight.by_blocks:
        return (x.q.float() * x.scales) @ (weight.q.float() * weight.scales[:, None]).T
    blocks = weight.scales.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]
    return (x.q.float() * x.scales.repeat_interleave(128, 1)[:, :K]) @ (weight.q.float() * blocks).T


SCALED = {
    "fp8": (torch.float8_e4m3fn, False),
    "fp8 blocks": (torch.float8_e4m3fn, True),
    "int8": (torch.int8, False),
}


def check_scaled() -> None:
    tickets = new_tickets("cuda")
    cases = product(SCALED, ((4100, 1024), (96, 3600)))
    run_all(partial(check_scaled_case, kind, N, K, tickets) for kind, (N, K) in cases)
    if tickets.any():
        print("WRONG scaled: tickets are left")


def check_scaled_case(kind: str, N: int, K: int, tickets: Tensor) -> None:
    dtype, by_blocks = SCALED[kind]
    K = K // 128 * 128 if by_blocks else K
    weight = random_scaled(N, K, dtype, by_blocks)
    for M in (1, 17, 64, 130):
        x = quantize_rows(rows(M, K), dtype, 128 if by_blocks else 0)
        truth = plain_scaled(x, weight)
        check(f"{kind} M={M} {N}x{K}", scaled_linear(x, weight, tickets=tickets), truth, 4e-3)
        whole = scaled_linear(x, weight, batch_invariant=True, tickets=tickets)
        check(f"{kind} M={M} {N}x{K} invariant", whole, truth, 4e-3)
        one = scaled_linear(QuantizedRows(*(t[:1] for t in x)), weight, batch_invariant=True, tickets=tickets)
        if not torch.equal(one, whole[:1]):
            print(f"WRONG {kind} {N}x{K}: one row differs from the same among {M}")


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
                        x.q,
                        weight.q.T,
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
                        x.q,
                        weight.q.T,
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


def sweep_scaled_row() -> None:
    for name, (N, K) in SHAPES.items():
        weights = [random_scaled(N, K, FP8, False) for _ in range(copies(N * K))]
        x = quantize_rows(rows(1, K), FP8)
        configs = [
            ScaledGemvConfig(block_n, block_k, warps)
            for block_n, block_k, warps in product((2, 4, 8), (1024, 2048, 4096), (2, 4, 8))
            if 512 <= block_n * block_k // warps <= 4096
        ]
        calls: dict[str, Calls] = {
            str(c): [partial(scaled_gemv, x, w.q, w.scales, None, torch.bfloat16, c, True) for w in weights]
            for c in configs
        }
        print_fastest(f"fp8 {name} one row", N * K, calls)


def sweep_scaled() -> None:
    sweep_scaled_row()
    tickets = new_tickets("cuda")
    for kind, name in [("fp8", shape) for shape in SHAPES] + [("fp8 blocks", "gate_up"), ("int8", "gate_up")]:
        (dtype, by_blocks), (N, K) = SCALED[kind], SHAPES[name]
        weights = [random_scaled(N, K, dtype, by_blocks) for _ in range(copies(N * K))]
        splits = splits_to_try(N, K)
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
