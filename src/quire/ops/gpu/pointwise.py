# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Functions of single numbers, computed in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.activation import activate
from quire.ops.opset import Activation

BLOCK = 1024  # numbers a program


def activate_elements(x: Tensor, kind: Activation) -> Tensor:
    """x [rows, n], rows may be strided -> [rows, n]"""
    rows, n = x.shape
    assert x.stride(1) == 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        _activate_kernel[(rows, triton.cdiv(n, BLOCK))](x, out, n, x.stride(0), KIND=int(kind), BLOCK=BLOCK)
    return out


def gate_rows(x: Tensor, gate: Tensor, kind: Activation) -> Tensor:
    """x and gate [rows, n], both may be strided -> x * activate(gate) [rows, n]"""
    rows, n = x.shape
    assert gate.shape == x.shape and x.stride(1) == gate.stride(1) == 1, f"{x.shape}, {gate.shape}"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rows:
        grid = rows, triton.cdiv(n, BLOCK)
        _gate_kernel[grid](x, gate, out, n, x.stride(0), gate.stride(0), KIND=int(kind), BLOCK=BLOCK)
    return out


def soft_cap_(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place."""
    assert x.is_contiguous()
    if x.numel():
        _soft_cap_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, cap, x.numel(), BLOCK=BLOCK)
    return x


@triton.jit
def _activate_kernel(x_ptr, out_ptr, n, x_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + columns, activate(x, KIND).to(out_ptr.dtype.element_ty), mask=columns < n)


@triton.jit
def _gate_kernel(x_ptr, gate_ptr, out_ptr, n, x_stride, gate_stride, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < n, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=columns < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + columns, (x * activate(gate, KIND)).to(out_ptr.dtype.element_ty), mask=columns < n)


@triton.jit
def _soft_cap_kernel(x_ptr, cap, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offset, mask=offset < n, other=0.0).to(tl.float32)
    y = cap * (2.0 * tl.sigmoid(2.0 * x / cap) - 1.0)  # tanh(u) = 2 sigmoid(2 u) - 1
    tl.store(x_ptr + offset, y.to(x_ptr.dtype.element_ty), mask=offset < n)
