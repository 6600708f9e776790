# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Weights in groups, dequantized to 16 bits: a whole matrix, for GEMMs so large that cuBLAS is worth the pass, or rows
of an embedding table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.grouped_scales import load_scales, offset_of, scale_of, zeros_of
from quire.ops.gpu.linear.unpack import asm_for, kernel_args, kernel_constants, unpack, word_places

BLOCK_N = 64  # outputs a program
BLOCK_IDS = 16  # rows of a table


def dequantize(weight: GroupedWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """-> [N, K] in `dtype`, bf16 or fp16; into `out` where given."""
    N, K = weight.num_outputs, weight.num_inputs
    out = torch.empty(N, K, dtype=dtype, device=weight.words.device) if out is None else out
    assert out.shape == (N, K) and out.dtype == dtype and out.is_contiguous()
    _dequantize(weight, None, None, out, BLOCK_N)
    return out


def dequantize_rows(ids: Tensor, weight: GroupedWeight, dtype: torch.dtype, last: Tensor | None = None) -> Tensor:
    """`embedding` from a quantized table: ids [T] -> [T, K] in `dtype`, bf16 or fp16."""
    out = torch.empty(len(ids), weight.num_inputs, dtype=dtype, device=weight.words.device)
    assert ids.is_contiguous()
    if len(ids):
        _dequantize(weight, ids, last, out, BLOCK_IDS)
    return out


def _dequantize(weight: GroupedWeight, ids: Tensor | None, last: Tensor | None, out: Tensor, block_n: int) -> None:
    asm = asm_for(weight, out.dtype)
    _dequantize_kernel[(triton.cdiv(len(out), block_n), weight.num_chunks)](
        ids,
        last,
        kernel_args(weight, asm),
        out,
        len(out),
        weight.num_outputs,
        weight.num_inputs,
        HAS_OFFSETS=weight.has_offsets,
        BLOCK_N=block_n,
        **kernel_constants(weight, asm),
    )


@triton.jit(do_not_specialize=["M"])
def _dequantize_kernel(
    ids_ptr,
    last_ptr,
    weight,  # GroupedArgs
    out_ptr,
    M,
    N,
    K,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    CODEBOOK: tl.constexpr,
    ASM: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, M - 1).to(tl.int64)  # outputs past the end are computed and never stored
    if ids_ptr is not None:
        rows = tl.load(ids_ptr + rows).to(tl.int64)
        if last_ptr is not None:
            rows = tl.where(rows < 0, tl.load(last_ptr - rows - 1, mask=rows < 0, other=0).to(tl.int64), rows)
    chunk = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    PLANES: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = max(PLANES * WIDTH // GROUP, 1)  # a chunk
    scales = load_scales(weight, chunk, rows, N, GROUP, PLANES * WIDTH, HAS_OFFSETS or ZERO < 0)
    zeros = zeros_of(scales, GROUPS, ZERO)
    offsets = word_places(rows, chunk, tl.num_programs(1), columns, WIDTH, CODEBOOK)
    high = None if weight.high is None else tl.load(weight.high + offsets)
    like = tl.zeros((1,), out_ptr.dtype.element_ty)
    planes = unpack(tl.load(weight.words + offsets), high, zeros, like, weight.codebook, BITS, ZERO, CODEBOOK, ASM)
    for plane in tl.static_range(PLANES):
        w = planes[plane].to(tl.float32) * scale_of(scales, plane * GROUPS // PLANES)[:, None]
        if HAS_OFFSETS:
            w += offset_of(scales, plane * GROUPS // PLANES)[:, None]
        k = (chunk * PLANES + plane) * WIDTH + columns
        inside = (outputs < M)[:, None] & (k < K)[None, :]
        tl.store(out_ptr + outputs.to(tl.int64)[:, None] * K + k[None, :], w.to(out_ptr.dtype.element_ty), mask=inside)
