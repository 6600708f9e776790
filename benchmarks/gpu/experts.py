"""Quantized experts of one layer for few tokens, whose routes are drawn at random: microseconds, and the share of the
time in which the bytes of the experts with routes could be read.

    python -m benchmarks.gpu.experts
    python -m benchmarks.gpu.experts --skew 1 --tokens 32 64     a router that prefers some experts

Layers take turns in one CUDA graph, each call with routes of its own, so the cache holds no expert for the next call.
`skew` is the standard deviation of the experts' logits; with 0 all experts are equally likely."""

import argparse
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.measuring import Calls, seconds_a_call
from quire.ops.gpu.compile_ahead import compile_ahead
from quire.ops.gpu.linear.e2m1 import E2M1
from quire.ops.gpu.linear.grouped_layout import GroupedWeight, pack_codebook4, pack_int4
from quire.ops.gpu.moe.moe import moe_mlp
from quire.ops.gpu.moe.quantized import QuantizedExperts, stack_experts
from quire.ops.opset import Activation

BANDWIDTH = 4.8e12  # bytes a second, of an H200
LAYERS, CALLS = 4, 8


class Shape(NamedTuple):
    experts: int
    chosen: int
    hidden: int
    inner: int
    mxfp4: bool  # else 4-bit integers in groups of 128


SHAPES = {"gpt-oss-20b, MXFP4": Shape(32, 4, 2880, 2880, True), "Qwen3-30B-A3B, int4": Shape(128, 8, 2048, 768, False)}


def random_weight(N: int, K: int, mxfp4: bool) -> GroupedWeight:
    q = torch.randint(0, 16, (N, K), dtype=torch.uint8, device="cuda")
    if mxfp4:
        return pack_codebook4(q, 2.0 ** torch.randint(-9, -4, (N, K // 32), device="cuda"), E2M1)
    return pack_int4(q, (torch.rand(N, K // 128, device="cuda") / 256).half(), zero=8)


def random_experts(shape: Shape, rows: int, K: int) -> QuantizedExperts:
    return stack_experts([random_weight(rows, K, shape.mxfp4) for _ in range(shape.experts)], shape.experts)


def random_routes(shape: Shape, T: int, skew: float) -> tuple[Tensor, Tensor]:
    """Experts without replacement (the largest of Gumbel's noise), and their weights: [T, chosen]"""
    logits = torch.randn(shape.experts, device="cuda") * skew
    noise = -torch.log(-torch.log(torch.rand(T, shape.experts, device="cuda")))
    weights, ids = (logits + noise).topk(shape.chosen)
    return ids.int(), weights.softmax(-1)


def measure(name: str, shape: Shape, tokens: list[int], skew: float) -> None:
    sizes = (2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)
    layers = [[random_experts(shape, *size) for size in sizes] for _ in range(LAYERS)]
    biases = [torch.randn(shape.experts, rows, device="cuda") for rows, _ in sizes]
    expert_bytes = sum(one.rows.words.nbytes + one.rows.scales.nbytes for one in layers[0]) / shape.experts
    cases: dict[int, tuple[Calls, float]] = {}
    for T in tokens:
        x = torch.randn(T, shape.hidden, device="cuda", dtype=torch.bfloat16)
        routes = [random_routes(shape, T, skew) for _ in range(CALLS)]
        calls: Calls = [
            partial(moe_mlp, x, *routes[i], *layers[i % LAYERS], Activation.CLAMPED_SWIGLU, *biases, 7.0, overlap=True)
            for i in range(CALLS)
        ]
        present = sum(len(ids.unique()) for ids, _ in routes) / CALLS
        cases[T] = calls, present * expert_bytes / BANDWIDTH
    compile_ahead(calls[0] for calls, _ in cases.values())
    for T, (calls, bound) in cases.items():
        seconds = seconds_a_call(calls)
        print(f"{name:22} {T:4} tokens  {seconds * 1e6:7.1f} us  bound {bound * 1e6:6.1f}  {bound / seconds:4.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 64], metavar="T")
    parser.add_argument("--skew", type=float, default=0.0)
    args = parser.parse_args()
    torch.manual_seed(1)
    for name, shape in SHAPES.items():
        measure(name, shape, args.tokens, args.skew)


if __name__ == "__main__":
    main()
