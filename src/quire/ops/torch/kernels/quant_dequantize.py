# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Weights in groups of codes, written out in 16 bits: for products so large that cuBLAS is worth a pass over them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.torch.kernels.quant_layout import GroupedWeight
from quire.ops.torch.kernels.quant_unpack import asm_for, table_of, take_plane, unpack

BLOCK_N = 64  # outputs a program


def dequantize(weight: GroupedWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """-> [N, K] in `dtype`, bf16 or fp16; into `out` where given."""
    N, K = weight.num_outputs, weight.num_inputs
    out = torch.empty(N, K, dtype=dtype, device=weight.words.device) if out is None else out
    assert out.shape == (N, K) and out.dtype == dtype and out.is_contiguous()
    asm = asm_for(weight, dtype)
    _dequantize_kernel[(triton.cdiv(N, BLOCK_N), weight.num_chunks)](
        weight.words,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
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
        HAS_OFFSET=weight.offsets is not None,
        BLOCK_N=BLOCK_N,
    )
    return out


@triton.jit
def _dequantize_kernel(
    words_ptr,
    scale_ptr,
    offset_ptr,
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
    HAS_OFFSET: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < N
    chunk = tl.program_id(1)
    columns = tl.arange(0, WIDTH)
    places = (outputs.to(tl.int64) * tl.num_programs(1) + chunk)[:, None] * WIDTH + columns[None, :]
    words = tl.load(words_ptr + places, mask=inside[:, None], other=0)
    like = tl.zeros((1,), out_ptr.dtype.element_ty)
    planes = unpack(words, like, BITS, ASM)
    PLANES: tl.constexpr = 32 // BITS
    for plane in tl.static_range(PLANES):
        first = (chunk * PLANES + plane) * WIDTH
        group = first // GROUP
        scales = tl.load(scale_ptr + group * N + outputs, mask=inside, other=0.0).to(tl.float32)
        values = take_plane(planes, like, table_ptr, plane, BITS, ZERO, TABLE, ASM)
        w = values.to(tl.float32) * scales[:, None]
        if HAS_OFFSET:
            w += tl.load(offset_ptr + group * N + outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
        k = first + columns
        places = outputs.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(out_ptr + places, w.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (k < K)[None, :])
