# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""GEMV, y = w @ x for one row x, both in fp8 or both in int8, without tensor cores.

Values are taken four at a time, as words of 32 bits: one instruction converts two of them to fp16, another multiplies
and adds two. The product of two fp8 values is a multiple of 2**-18 below 2**18. x is divided by 64 beforehand, so these
products are exact in fp16, and two of them are added there before they go into fp32. Of int8, one instruction
multiplies four values and adds the products to a sum of 32 bits. While a step is multiplied, the weights of the next
one are in flight."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.quantize_rows import QuantizedRows
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

X_DIVISOR = tl.constexpr(64.0)
EXPAND = tl.constexpr("""{
.reg .b16 a, b;
.reg .b32 c, d, lowered;
mov.b32 {a, b}, $2;
mov.b32 lowered, 0x24002400;
cvt.rn.f16x2.e4m3x2 c, a;
cvt.rn.f16x2.e4m3x2 d, b;
mul.rn.f16x2 $0, c, lowered;
mul.rn.f16x2 $1, d, lowered;
}""")  # 0x2400: 1/64
MULTIPLY = tl.constexpr("""{
.reg .b16 a, b;
.reg .b32 c, d;
.reg .f32 e, f;
mov.b32 {a, b}, $1;
cvt.rn.f16x2.e4m3x2 c, a;
cvt.rn.f16x2.e4m3x2 d, b;
mul.rn.f16x2 c, c, $2;
fma.rn.f16x2 c, d, $3, c;
mov.b32 {a, b}, c;
cvt.f32.f16 e, a;
cvt.f32.f16 f, b;
add.f32 e, e, f;
add.f32 $0, e, $4;
}""")


class ScaledGemvConfig(NamedTuple):
    block_n: int  # outputs a program
    block_k: int  # inputs a step
    warps: int


def scaled_gemv(
    x: QuantizedRows,
    q: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: ScaledGemvConfig,
    overlap: bool = False,
) -> Tensor:
    """x one row of K, q [N, K] float8_e4m3fn or int8, scales [N] -> [1, N]. K is a multiple of 4."""
    N, K = q.shape
    assert x.q.shape == (1, K) and x.q.dtype == q.dtype and q.dtype in (torch.float8_e4m3fn, torch.int8) and K % 4 == 0
    assert x.scales.shape == (1, 1) and q.is_contiguous()
    out = torch.empty(1, N, dtype=dtype, device=q.device)
    _scaled_gemv_kernel[(triton.cdiv(N, config.block_n),)](
        x.q.view(torch.int32),
        x.scales,
        q.view(torch.int32),
        scales,
        bias,
        out,
        N,
        K // 4,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k // 4,
        INTEGER=q.dtype == torch.int8,
        ASM=not triton.knobs.runtime.interpret,
        OVERLAP=overlap,
        num_warps=config.warps,
        **overlap_options(overlap),
    )
    return out


@triton.jit
def _scaled_gemv_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTEGER: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """K and BLOCK_K count words."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < N
    w_rows = w_ptr + tl.minimum(outputs, N - 1).to(tl.int64)[:, None] * K
    columns = tl.arange(0, BLOCK_K)
    w_next = _load(w_rows, columns, K)
    scales = tl.load(w_scale_ptr + outputs, mask=inside, other=0.0)
    wait_for_inputs(OVERLAP)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.int32 if INTEGER else tl.float32)
    for first in range(0, K, BLOCK_K):
        w = w_next
        k = columns + first
        w_next = _load(w_rows, k + BLOCK_K, K)
        x = tl.load(x_ptr + k, mask=k < K, other=0)[None, :]
        acc = add_dot4_int8(acc, w, x, ASM) if INTEGER else add_dot4(acc, w, x, ASM)
    DIVISOR: tl.constexpr = 1.0 if INTEGER else X_DIVISOR
    y = tl.sum(acc, axis=1).to(tl.float32) * (scales * tl.load(x_scale_ptr) * DIVISOR)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load(w_rows, k, K):
    return tl.load(w_rows + k[None, :], mask=(k < K)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def add_dot4(acc, w, x, ASM: tl.constexpr):
    """acc fp32 + w * x / X_DIVISOR. w [n, k] and x [1, k]: words of four fp8 values"""
    if ASM:
        low, high = tl.inline_asm_elementwise(EXPAND, "=r,=r,r", [x], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
        acc = tl.inline_asm_elementwise(
            MULTIPLY, "=r,r,r,r,r", [w, low, high, acc], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            acc += _fp8_at(w, byte) * (_fp8_at(x, byte) / X_DIVISOR)
    return acc


@triton.jit
def add_dot4_int8(acc, w, x, ASM: tl.constexpr):
    """acc int32 + w * x. w [n, k] and x [1, k]: words of four int8 values"""
    if ASM:
        acc = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [w, x, acc], tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            acc += ((w << (24 - 8 * byte)) >> 24) * ((x << (24 - 8 * byte)) >> 24)
    return acc


@triton.jit
def _fp8_at(word, BYTE: tl.constexpr):
    return (word >> (8 * BYTE)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
