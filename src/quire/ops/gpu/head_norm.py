# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""RMS norms of heads, or of groups of columns: a row has several, each with a sum of its own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.activation import activate
from quire.ops.opset import Activation


def norm_heads(
    x: Tensor,
    weight: Tensor,
    eps: float,
    size: int,
    gate: Tensor | None = None,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """x [T, n], rows may be strided -> every `size` neighbouring columns divided by their root mean square, times the
    weight, [size] or [n]; and with `gate` [T, n], times activate(gate)."""
    rows, n = x.shape
    assert x.stride(1) == 1 and n % size == 0 and weight.shape in ((size,), (n,)), f"{x.shape}, {weight.shape}"
    assert gate is None or (gate.shape == x.shape and gate.stride(1) == 1)
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _norm_heads_kernel[(rows, n // size)](
            x,
            weight,
            x if gate is None else gate,
            out,
            n,
            eps,
            x.stride(0),
            x.stride(0) if gate is None else gate.stride(0),
            SIZE=size,
            SHARED=len(weight) == size,
            ACTIVATION=-1 if gate is None else int(activation),
            BLOCK=block,
            num_warps=1 if block <= 512 else 4,
        )
    return out


@triton.jit
def _norm_heads_kernel(
    x, weight, gate, out, n, eps, x_stride, gate_stride,
    SIZE: tl.constexpr, SHARED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.arange(0, BLOCK)
    inside, column = index < SIZE, head * SIZE + index
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if SHARED:
        weights = tl.load(weight + index, mask=inside, other=0.0).to(tl.float32)
    else:
        weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps) * weights
    if ACTIVATION >= 0:
        gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        normed *= activate(gates, ACTIVATION)
    tl.store(out + row * n + column, normed.to(out.dtype.element_ty), mask=inside)
