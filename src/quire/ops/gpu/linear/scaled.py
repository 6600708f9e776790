# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = x @ w.T with 8-bit activations and 8-bit weights, both fp8 (e4m3) or both int8.

    scales of x       scales of w        known as
    one a row         one an output      W8A8, dynamic per token
    1 x 128 inputs    128 x 128 blocks   DeepSeek's fp8

Activations are quantized for any number of rows, one included: it is what the checkpoint's author measured, and fp8
goes into the tensor cores without an instruction spent on it. Hopper accumulates fp8 with some 14 bits, so every 128
inputs the sums are added up in fp32. int8 sums are exact. One row goes without tensor cores (scaled_gemv.py), unless
rows are to be batch invariant."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.linear import PROGRAMS, num_splits
from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.linear.scaled_gemv import ScaledGemvConfig, scaled_gemv
from quire.ops.gpu.linear.split_k import finish, split_launch
from quire.ops.gpu.overlap import overlap_options, prefetch, wait_for_inputs

BLOCK_K = 128  # inputs a step, and the side of a block of scales
MAX_STREAM_ROWS = 64  # beyond it cuBLAS, where rows have scales
MAX_INT8_KERNEL_ROWS = 512  # of int8: cuBLAS leaves sums of 32 bits, which another kernel has to read
MAX_NARROW_ROWS, MAX_NARROW_OUTPUTS = 128, 8192  # but cuBLAS does not split K, and so few tiles fill half of the device


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """An 8-bit matrix [N, K], to be multiplied with 8-bit rows."""

    q: Tensor  # [N, K] float8_e4m3fn or int8
    scales: Tensor  # fp32: [N], or by blocks [N / 128, K / 128], rounded up

    @property
    def by_blocks(self) -> bool:
        return len(self.scales.shape) == 2

    @property
    def can_gemv(self) -> bool:
        return not self.by_blocks and self.q.shape[1] % 4 == 0

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.q, self.scales))


class ScaledConfig(NamedTuple):
    block_m: int  # tokens a program
    block_n: int  # outputs a program
    splits: int  # of K
    serial: bool  # as in StreamConfig
    warps: int
    stages: int


# block_m: (block_n, warps, stages)
CONFIGS = {16: (64, 4, 6), 32: (64, 4, 6), 64: (64, 4, 5)}
LARGE_CONFIG = (128, 8, 4)  # (block_n, warps, stages) for more rows
INT8_CONFIG = (128, 128, 8, 3)  # (block_m, block_n, warps, stages) for more rows of int8
GEMV = ScaledGemvConfig(block_n=4, block_k=2048, warps=4)


def scaled_linear(
    x: QuantizedRows,
    weight: ScaledWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch_invariant: bool = False,
    tickets: Tensor | None = None,
    overlap: bool = False,
    all_outputs: int | None = None,
) -> Tensor:
    """x [M, K] -> [M, N] in `dtype`. x has one scale a row, or one for 128 inputs where w has scales of blocks.
    `all_outputs`: as in `linear`."""
    M = len(x.q)
    if M == 0:
        return x.q.new_empty(0, len(weight.q), dtype=dtype)
    narrow = M <= MAX_NARROW_ROWS and len(weight.q) <= MAX_NARROW_OUTPUTS
    most = MAX_INT8_KERNEL_ROWS if weight.q.dtype == torch.int8 else MAX_STREAM_ROWS
    if most < M and not narrow and not batch_invariant and not weight.by_blocks:
        return _cublas(x, weight, bias, dtype)
    if M == 1 and weight.can_gemv and not batch_invariant:
        return scaled_gemv(x, weight.q, weight.scales, bias, dtype, GEMV, overlap)
    config = scaled_config(M, weight, batch_invariant, all_outputs)
    return scaled_kernel(x, weight, bias, dtype, config, tickets, overlap)


def scaled_config(M: int, weight: ScaledWeight, batch_invariant: bool, all_outputs: int | None = None) -> ScaledConfig:
    """Many rows need no splits, unless they must be added up as few are."""
    N, K = weight.q.shape
    splits = num_splits(all_outputs or N, K)
    if MAX_STREAM_ROWS < M <= MAX_NARROW_ROWS and len(weight.q) <= MAX_NARROW_OUTPUTS and not batch_invariant:
        return ScaledConfig(64, CONFIGS[64][0], max(splits // 2, 1), False, *CONFIGS[64][1:])
    many = M > MAX_STREAM_ROWS
    if many and weight.q.dtype == torch.int8 and not batch_invariant and not weight.by_blocks:
        block_m, block_n, warps, stages = INT8_CONFIG
        tiles = triton.cdiv(M, block_m) * triton.cdiv(len(weight.q), block_n)
        return ScaledConfig(block_m, block_n, min(splits, max(PROGRAMS // tiles, 1)), False, warps, stages)
    block_m = next(block for block in CONFIGS if block >= M or block == 64)
    block_n, warps, stages = LARGE_CONFIG if many else CONFIGS[block_m]
    return ScaledConfig(block_m, block_n, splits if batch_invariant or not many else 1, many, warps, stages)


def scaled_kernel(
    x: QuantizedRows,
    weight: ScaledWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: ScaledConfig,
    tickets: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    (M, K), N = x.q.shape, len(weight.q)
    assert x.q.dtype == weight.q.dtype and weight.q.shape == (N, K)
    assert x.scales.shape == (M, -(-K // BLOCK_K) if weight.by_blocks else 1), x.scales.shape
    assert BLOCK_K % config.block_n == 0  # a tile of outputs has one scale for a block of inputs
    assert x.q.is_contiguous() and weight.q.is_contiguous()
    out = torch.empty(M, N, dtype=dtype, device=x.q.device)
    launch = split_launch(config, out, bias, tickets)
    _scaled_kernel[launch.grid](
        x.q,
        x.scales,
        weight.q,
        weight.scales,
        launch.to,
        M,
        N,
        K,
        BY_BLOCKS=weight.by_blocks,
        WHOLE_CHUNKS=K % BLOCK_K == 0,
        BLOCK_K=BLOCK_K,
        OVERLAP=overlap,
        num_warps=config.warps,
        enable_fp_fusion=False,  # a split is rounded before it is added, also where one program adds them all
        **launch.constants,
        **overlap_options(overlap),
    )
    return out


@triton.jit(do_not_specialize=["M"])
def _scaled_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    to,  # OutputArgs
    M,
    N,
    K,
    BY_BLOCKS: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.minimum(outputs, N - 1)  # outputs past the end are computed and never stored
    w_rows = w_ptr + rows.to(tl.int64)[:, None] * K
    x_rows = x_ptr + tokens.to(tl.int64)[None, :] * K
    present = tokens < M
    chunks = tl.cdiv(K, BLOCK_K)
    split_chunks = tl.cdiv(chunks, SPLITS)
    TURNS: tl.constexpr = SPLITS // SHARES
    INTEGER: tl.constexpr = w_ptr.dtype.element_ty == tl.int8
    ZERO: tl.constexpr = 0 if INTEGER else 0.0
    if OVERLAP:
        first_k = tl.program_id(1) * TURNS * split_chunks * BLOCK_K + tl.arange(0, 4) * 128  # 4 cache lines of each row
        prefetch(w_rows + tl.minimum(first_k, K - 1)[None, :])
    wait_for_inputs(OVERLAP)

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for turn in range(TURNS):
        first = (tl.program_id(1) * TURNS + turn) * split_chunks
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if INTEGER and not BY_BLOCKS else tl.float32)
        for chunk in tl.range(first, tl.minimum(first + split_chunks, chunks), num_stages=STAGES):
            k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
            if BY_BLOCKS:
                w_scale = tl.load(w_scale_ptr + tl.program_id(0) * BLOCK_N // BLOCK_K * chunks + chunk)
                x_scales = tl.load(x_scale_ptr + tokens.to(tl.int64) * chunks + chunk, mask=present, other=0.0)
            if WHOLE_CHUNKS:
                w = tl.load(w_rows + k[None, :], eviction_policy="evict_first")
                x = tl.load(x_rows + k[:, None], mask=present[None, :], other=ZERO)
            else:
                inside = k < K
                w = tl.load(w_rows + k[None, :], mask=inside[None, :], other=ZERO, eviction_policy="evict_first")
                x = tl.load(x_rows + k[:, None], mask=present[None, :] & inside[:, None], other=ZERO)
            if BY_BLOCKS:
                acc += tl.dot(w, x).to(tl.float32) * (w_scale * x_scales)[None, :]
            elif INTEGER:
                acc = tl.dot(w, x, acc, out_dtype=tl.int32)
            else:
                acc += tl.dot(w, x)
        if BY_BLOCKS:
            total += acc
        else:  # each split is scaled by itself, whether one program adds up the splits or the last of several
            w_scales = tl.load(w_scale_ptr + rows)
            x_scales = tl.load(x_scale_ptr + tokens, mask=present, other=0.0)
            total += acc.to(tl.float32) * (w_scales[:, None] * x_scales[None, :])
    finish(total, to, outputs, tokens, N, M, SHARES)


# -- many rows --------------------------------------------------------------------------------------------------------


def _cublas(x: QuantizedRows, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """cuBLAS wants sides that are multiples of 16."""
    N, K = weight.q.shape
    if N % 16 or K % 16:
        return scaled_kernel(x, weight, bias, dtype, scaled_config(len(x.q), weight, batch_invariant=False))
    if x.q.dtype == torch.int8:
        return _rescale(torch._int_mm(x.q, weight.q.T), x.scales, weight.scales, bias, dtype)
    return torch._scaled_mm(
        x.q,
        weight.q.T,
        scale_a=x.scales,
        scale_b=weight.scales[None, :],
        bias=None if bias is None else bias.to(dtype),
        out_dtype=dtype,
    )


def _rescale(sums: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sums [M, N] int32, scales [M, 1] and [N] -> [M, N] in `dtype`"""
    M, N = sums.shape
    out = torch.empty(M, N, dtype=dtype, device=sums.device)
    _rescale_kernel[(M, triton.cdiv(N, 2048))](
        sums, x_scales, w_scales, out if bias is None else bias, out, N, HAS_BIAS=bias is not None, BLOCK=2048
    )
    return out


@triton.jit
def _rescale_kernel(
    sums_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, N, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    y = tl.load(sums_ptr + row * N + columns, mask=inside, other=0).to(tl.float32)
    y *= tl.load(w_scale_ptr + columns, mask=inside, other=0.0) * tl.load(x_scale_ptr + row)
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + columns, y.to(out_ptr.dtype.element_ty), mask=inside)
