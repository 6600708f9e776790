# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Functions of single numbers that recurrences need, in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers a program


def log_decay(x: Tensor, bias: Tensor, rate: Tensor) -> Tensor:
    """x [T, n], rows may be strided -> -rate * softplus(x + bias) [T, n] in fp32"""
    return _log_decay(x, bias, rate, 0.0)


def log_bounded_decay(x: Tensor, bias: Tensor, rate: Tensor, bound: float) -> Tensor:
    """x [T, n], rows may be strided -> bound * sigmoid(rate * (x + bias)) [T, n] in fp32"""
    assert bound < 0, f"a bound of {bound}"
    return _log_decay(x, bias, rate, bound)


def _log_decay(x: Tensor, bias: Tensor, rate: Tensor, bound: float) -> Tensor:
    """A `bound` of 0: there is none."""
    rows, n = x.shape
    assert x.stride(1) == 1 and bias.shape == rate.shape == (n,), f"{x.shape}, {bias.shape}, {rate.shape}"
    out = torch.empty(rows, n, dtype=torch.float32, device=x.device)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(n))
        grid = (rows, triton.cdiv(n, block))
        _log_decay_kernel[grid](x, bias, rate, out, n, x.stride(0), bound, IS_BOUNDED=bound < 0, BLOCK=block)
    return out


@triton.jit
def softplus(x):
    """log(1 + exp(x)), exact where exp(x) is far below 1."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    exact = tl.where(total == 1.0, power, tl.log(total) * (power / tl.where(total == 1.0, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def _log_decay_kernel(
    x_ptr, bias_ptr, rate_ptr, out_ptr, n, x_stride, bound, IS_BOUNDED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + columns, mask=inside, other=0.0)
    rate = tl.load(rate_ptr + columns, mask=inside, other=0.0)
    log = bound * tl.sigmoid(rate * x) if IS_BOUNDED else -rate * softplus(x)
    tl.store(out_ptr + row * n + columns, log, mask=inside)
