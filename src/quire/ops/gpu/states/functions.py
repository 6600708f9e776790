# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Functions of single numbers that recurrences need, in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers a program


def log_decay(x: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    """x [T, n], rows may be strided -> -rate * softplus(x + bias) [T, n] in fp32"""
    rows, n = x.shape
    assert x.stride(1) == 1 and bias.shape == rate.shape == (n,), f"{x.shape}, {bias.shape}, {rate.shape}"
    out = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    if rows:
        grid = (rows, triton.cdiv(n, BLOCK))
        _log_decay_kernel[grid](x, bias, rate, out, n, x.stride(0), BLOCK=min(BLOCK, triton.next_power_of_2(n)))
    return out


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact where exp(x) is far below 1."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    exact = tl.where(total == 1.0, power, tl.log(total) * (power / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _log_decay_kernel(x_ptr, bias_ptr, rate_ptr, out_ptr, n, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    rate = tl.load(rate_ptr + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * n + columns, -rate * softplus(x), mask=inside)
