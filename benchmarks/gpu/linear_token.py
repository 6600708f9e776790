"""All of a token's way through Llama-3.1-8B but attention, with and without overlapped kernels."""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.linear_quantized import FP8, random_grouped, random_scaled
from benchmarks.gpu.measuring import Calls, Ceilings, rows, seconds_a_call
from benchmarks.gpu.shapes import SHAPES
from quire.ops.gpu.activation import activate_and_mul_quantized, silu_and_mul
from quire.ops.gpu.linear.grouped import grouped_linear, quantized_input
from quire.ops.gpu.linear.linear import linear
from quire.ops.gpu.linear.quantize_rows import QuantizedRows, quantize_rows
from quire.ops.gpu.linear.scaled import scaled_linear
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.gpu.norm import add_rms_norm, add_rms_norm_quantized
from quire.ops.opset import Activation

LAYERS = 32
FORMATS = ("bf16", "fp8", "int4 g128")


def random_weight(kind: str, N: int, K: int) -> Any:
    if kind == "bf16":
        return rows(N, K) / 64
    return random_scaled(N, K, FP8, False) if kind == "fp8" else random_grouped(4, N, K, 128, True, False)


def token_calls(kind: str, M: int, overlap: bool, tickets: Tensor) -> tuple[Calls, int]:
    """All of a token's way but attention, the head last, as one call; and the bytes of the weights."""
    layers = [
        {name: random_weight(kind, *SHAPES[name]) for name in ("qkv", "o", "gate_up", "down")} for _ in range(LAYERS)
    ]
    head, norm_weight = rows(*SHAPES["head"]) / 64, torch.ones(4096, device="cuda")
    input_type: tuple[torch.dtype, int] | None = None  # dtype and group of the quantized input
    if kind == "fp8":
        input_type = (FP8, 0)
    elif kind != "bf16":
        input_type = quantized_input(M, layers[0]["qkv"])

    def times(x: Any, w: Any) -> Tensor:
        if kind == "bf16":
            return linear(x, w, tickets=tickets, overlap=overlap)
        if input_type and not isinstance(x, QuantizedRows):
            x = quantize_rows(x, *input_type, overlap)
        if kind == "fp8":
            return scaled_linear(x, w, tickets=tickets, overlap=overlap)
        return grouped_linear(x, w, tickets=tickets, overlap=overlap)

    def norm(x: Tensor, residual: Tensor) -> tuple[Any, Tensor]:
        if input_type:
            return add_rms_norm_quantized(x, residual, norm_weight, 1e-5, *input_type, overlap)
        return add_rms_norm(x, residual, norm_weight, 1e-5, overlap)

    def active(x: Tensor) -> Any:
        if input_type:
            return activate_and_mul_quantized(x, Activation.SILU, *input_type, overlap)
        return silu_and_mul(x, overlap)

    x, residual = rows(M, 4096), rows(M, 4096)

    def token(x: Tensor = x, residual: Tensor = residual) -> Tensor:
        for layer in layers:
            normed, residual = norm(x, residual)
            x = times(times(normed, layer["qkv"])[:, :4096].contiguous(), layer["o"])
            normed, residual = norm(x, residual)
            x = times(active(times(normed, layer["gate_up"])), layer["down"])
        return linear(add_rms_norm(x, residual, norm_weight, 1e-5, overlap)[0], head, tickets=tickets)

    return [token], head.nbytes + sum(w.nbytes for layer in layers for w in layer.values())


def check_token() -> None:
    """With and without overlap, the same bits."""
    tickets = new_tickets("cuda")
    for M, (N, K) in product((1, 5), ((4096, 4096), (100, 1024))):
        x, residual, norm_weight, w = rows(M, K), rows(M, K), torch.ones(K, device="cuda"), rows(N, K)
        grouped, scaled = random_grouped(4, N, K, 128, False, False), random_scaled(N, K, FP8, False)
        results = []
        for overlap in (False, True):
            normed, _ = add_rms_norm(x, residual, norm_weight, 1e-5, overlap)
            quantized, _ = add_rms_norm_quantized(x, residual, norm_weight, 1e-5, FP8, overlap=overlap)
            results.append(
                [
                    linear(normed, w, tickets=tickets, overlap=overlap),
                    linear(normed, w, batch_invariant=True, tickets=tickets, overlap=overlap),
                    grouped_linear(normed, grouped, tickets=tickets, overlap=overlap),
                    scaled_linear(quantized, scaled, tickets=tickets, overlap=overlap),
                ]
            )
        for number, (apart, overlapped) in enumerate(zip(*results, strict=True)):
            if not torch.equal(apart, overlapped):
                print(f"WRONG overlap M={M} {N}x{K}: GEMM {number} differs")


def run_token(ceilings: Ceilings) -> None:
    tickets = new_tickets("cuda")
    for kind, M, overlap in product(FORMATS, (1, 16), (False, True)):
        calls, nbytes = token_calls(kind, M, overlap, tickets)
        line = ceilings.line(f"token {kind} M={M} overlap={overlap}", seconds_a_call(calls), nbytes, 0)
        print(line, flush=True)
