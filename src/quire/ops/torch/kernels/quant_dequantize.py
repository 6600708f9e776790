# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Weights in groups of codes, written out in 16 bits: for products so large that cuBLAS is worth a pass over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.torch.kernels.quant_layout import GroupedWeight
from quire.ops.torch.kernels.quant_scales import load_scales, offset_of, scale_of
from quire.ops.torch.kernels.quant_unpack import asm_for, table_of, unpack

BLOCK_N = 64  # outputs a program


def dequantize(weight: GroupedWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """-> [N, K] in `dtype`, bf16 or fp16; into `out` where given."""
    N, K = weight.num_outputs, weight.num_inputs
    out = torch.empty(N, K, dtype=dtype, device=weight.words.device) if out is None else out
    assert out.shape == (N, K) and out.dtype == dtype and out.is_contiguous()
    asm = asm_for(weight, dtype)
    _dequantize_kernel[(triton.cdiv(N, BLOCK_N), weight.num_chunks)](
        weight.words,
        weight.high,
        weight.scales,
        weight.offsets,
        weight.units,
        table_of(weight, asm),
        out,
        N,
        K,
        BITS=weight.bits,
        GROUP=weight.group,
        WIDTH=weight.width,
        ZERO=weight.zero,
        TABLE=bool(weight.table),
        ASM=asm,
        HAS_OFFSETS=weight.has_offsets,
        BLOCK_N=BLOCK_N,
    )
    return out


@triton.jit
def _dequantize_kernel(
    words_ptr,
    high_ptr,
    scale_ptr,
    offset_ptr,
    unit_ptr,
    table_ptr,
    out_ptr,
    N,
    K,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, N - 1).to(tl.int64)  # those past the end are computed and never stored
    chunk = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    PLANES: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = max(PLANES * WIDTH // GROUP, 1)  # a chunk
    scales = load_scales(scale_ptr, offset_ptr, unit_ptr, chunk, rows, N, GROUP, PLANES * WIDTH)
    places = (rows * tl.num_programs(1) + chunk)[:, None] * WIDTH + columns[None, :]
    high = None if high_ptr is None else tl.load(high_ptr + places)
    like = tl.zeros((1,), out_ptr.dtype.element_ty)
    planes = unpack(tl.load(words_ptr + places), high, like, table_ptr, BITS, ZERO, TABLE, ASM)
    for plane in tl.static_range(PLANES):
        w = planes[plane].to(tl.float32) * scale_of(scales, plane * GROUPS // PLANES)[:, None]
        if HAS_OFFSETS:
            w += offset_of(scales, plane * GROUPS // PLANES)[:, None]
        k = (chunk * PLANES + plane) * WIDTH + columns
        inside = (outputs < N)[:, None] & (k < K)[None, :]
        tl.store(out_ptr + rows[:, None] * K + k[None, :], w.to(out_ptr.dtype.element_ty), mask=inside)
