"""Products with matrices as GGUF files have them, and as `gpu_codes` keeps them: right, and microseconds by type."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.linear_quantized import check_products, clone
from benchmarks.gpu.measuring import Calls, Ceilings, check, copies, print_fastest, rows, run_all, seconds_a_call
from benchmarks.gpu.shapes import SHAPES, splits_to_try
from quire.ops.dequantize import dequantize as plain_numbers
from quire.ops.gpu.linear.dequantize import dequantize
from quire.ops.gpu.linear.grouped import grouped_kernel, grouped_linear
from quire.ops.gpu.linear.grouped_config import GroupedConfig
from quire.ops.gpu.linear.grouped_gemv import GroupedGemvConfig, can_gemv, grouped_gemv, x_group
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.quantize_rows import quantize_rows
from quire.ops.gpu.linear.quantized_weights import load_quantized
from quire.ops.gpu.linear.split_k import new_tickets
from quire.ops.tensors import STORAGE_TYPES, StoredTensor

# Where a block has its fp16 numbers. All its other bytes may be anything.
TYPES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q2_K": (80, 82),
    "Q8_0": (0,),
}  # fmt: skip
SHAPE = SHAPES["down"]


def random_stored(name: str, N: int, K: int) -> StoredTensor:
    type, rng = STORAGE_TYPES[name], np.random.default_rng(0)
    blocks = rng.integers(0, 256, (N, K // type.block, type.block_bytes), dtype=np.uint8)
    for place in TYPES[name]:
        scales = rng.uniform(1e-4, 1e-3, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, place : place + 2] = scales.view(np.uint8)
    return StoredTensor(name, (N, K), type, blocks.reshape(N, -1))


def random_weight(name: str, N: int, K: int) -> GroupedWeight:
    weight = load_quantized([random_stored(name, N, K)], torch.device("cuda"))
    assert isinstance(weight, GroupedWeight)
    return weight


def repeated_weight(name: str, N: int, K: int) -> GroupedWeight:
    """The same random rows again and again: large matrices are made in no time."""
    first = random_weight(name, 64, K)

    def repeat(tensor: Tensor | None, axis: int) -> Tensor | None:
        if tensor is None:
            return None
        times = [-(-N // 64) if i == axis else 1 for i in range(tensor.dim())]
        return tensor.repeat(*times).narrow(axis, 0, N).contiguous()

    by_output = {field: repeat(getattr(first, field), 0) for field in ("words", "high")}
    by_group = {field: repeat(getattr(first, field), 1) for field in ("scales", "offsets", "super_scales")}
    return replace(first, num_outputs=N, **by_output, **by_group)


def check_stored() -> None:
    tickets = new_tickets("cuda")
    run_all(partial(check_case, name, N, K, tickets) for name, (N, K) in product(TYPES, ((4100, 1024), (70, 3584))))
    if tickets.any():
        print("WRONG stored: tickets are left")


def check_case(name: str, N: int, K: int, tickets: Tensor) -> None:
    weight = random_weight(name, N, K)
    w = torch.from_numpy(plain_numbers(random_stored(name, N, K))).cuda()
    for dtype in (torch.bfloat16, torch.float16):
        if not torch.equal(dequantize(weight, dtype), w.to(dtype)):
            check(f"{name} {N}x{K} written out in {dtype}", dequantize(weight, dtype), w, torch.finfo(dtype).eps)
    check_products(f"{name} {N}x{K}", weight, w, (1, 17, 64, 130), tickets)


def run_stored(ceilings: Ceilings) -> None:
    (N, K), tickets = SHAPE, new_tickets("cuda")
    for name in TYPES:
        first = random_weight(name, N, K)
        weights = [first] + [clone(first) for _ in range(copies(first.nbytes) - 1)]
        for M in (1, 16, 64):
            x = rows(M, K)
            seconds = seconds_a_call([partial(grouped_linear, x, w, tickets=tickets) for w in weights])
            bits = first.nbytes * 8 / (N * K)
            print(ceilings.line(f"{name} ({bits:.2f} bits) down M={M}", seconds, first.nbytes, 2 * M * N * K))
        seconds = seconds_a_call([partial(dequantize, w, torch.bfloat16) for w in weights])
        print(ceilings.line(f"{name} down written out", seconds, first.nbytes + 2 * N * K, 0))


def sweep_stored() -> None:
    tickets = new_tickets("cuda")
    for name, (shape, (N, K)) in product(("Q4_K", "Q6_K"), SHAPES.items()):
        first = random_weight(name, N, K)
        weights = [first] + [clone(first) for _ in range(copies(first.nbytes) - 1)]
        for M in (1, 16, 64):
            calls = gemv_calls(weights) if M == 1 and can_gemv(first) else kernel_calls(M, weights, tickets)
            print_fastest(f"{name} {shape} M={M}", first.nbytes, calls)


def gemv_calls(weights: list[GroupedWeight]) -> dict[str, Calls]:
    x = quantize_rows(rows(1, weights[0].num_inputs), torch.int16, x_group(weights[0]))
    configs = [GroupedGemvConfig(8 * outputs, 8, depth) for outputs, depth in product((2, 4), (1, 2, 4))]
    return {str(c): [partial(grouped_gemv, x, w, None, c, torch.bfloat16, True) for w in weights] for c in configs}


def kernel_calls(M: int, weights: list[GroupedWeight], tickets: Tensor) -> dict[str, Calls]:
    N, K = weights[0].num_outputs, weights[0].num_inputs
    configs = [
        GroupedConfig(max(M, 16), block_n, splits, False, warps, stages)
        for (block_n, warps), splits, stages in product(((64, 4), (128, 4), (128, 8)), splits_to_try(N, K), (2, 3, 4))
    ]
    x = rows(M, K)
    return {str(c): [partial(grouped_kernel, x, w, None, c, tickets) for w in weights] for c in configs}
