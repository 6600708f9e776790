# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Activations with a gate: x [rows, 2 n] -> f(x[:, :n]) * x[:, n:], computed in fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.quantize_rows import QuantizedRows, Target, row_block, row_warps, store_columns
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs
from quire.ops.gpu.states.functions import softplus
from quire.ops.opset import Activation

BLOCK = 1024  # columns a program, where it need not see the whole row


def silu_and_mul(x: Tensor, overlap: bool = False) -> Tensor:
    return activate_and_mul(x, Activation.SILU, overlap)


def gelu_and_mul(x: Tensor, overlap: bool = False) -> Tensor:
    return activate_and_mul(x, Activation.GELU, overlap)


def gelu_tanh_and_mul(x: Tensor, overlap: bool = False) -> Tensor:
    return activate_and_mul(x, Activation.GELU_TANH, overlap)


def activate_and_mul(x: Tensor, activation: Activation, overlap: bool = False) -> Tensor:
    """x [rows, 2 n] -> [rows, n]. Rows may be strided."""
    target = Target.plain(x, x.shape[1] // 2)
    _launch(x, activation, target, overlap)
    return target.out


def activate_and_mul_quantized(
    x: Tensor, activation: Activation, dtype: torch.dtype, group: int = 0, overlap: bool = False
) -> QuantizedRows:
    """`activate_and_mul`, quantized to fp8, int8 or int16 with a scale for each row, or for each `group` columns."""
    target = Target.quantized(x, x.shape[1] // 2, dtype, group)
    _launch(x, activation, target, overlap)
    return target.result


def _launch(x: Tensor, activation: Activation, target: Target, overlap: bool) -> None:
    rows, n = len(x), x.shape[1] // 2
    assert x.shape == (rows, 2 * n) and x.stride(1) == 1, f"x {x.shape} {x.stride()}"
    whole_row = target.quant_max > 0 and target.group == 0
    block = row_block(n) if whole_row else max(BLOCK, target.group)
    if rows:
        _activation_kernel[(rows, triton.cdiv(n, block))](
            x,
            target.out,
            target.scales,
            n,
            x.stride(0),
            ACTIVATION=int(activation),
            GROUP=target.group or block,
            QUANT_MAX=target.quant_max,
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=row_warps(block) if whole_row else 4,
            **overlap_options(overlap),
        )


@triton.jit
def _activation_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    n,
    x_stride,
    ACTIVATION: tl.constexpr,
    GROUP: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)
    inside = columns < n
    wait_for_inputs(OVERLAP)
    gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + n + columns, mask=inside, other=0.0).to(tl.float32)
    y = activate_times(gate, up, ACTIVATION)
    if (
        QUANT_MAX > 0 and QUANT_MAX < 1000
    ):  # 8 bits, with the bits of a row that was stored, gathered and then quantized
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    store_columns(out_ptr, scale_ptr, y, row, first, n, GROUP, QUANT_MAX, BLOCK)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """x fp32 -> fp32; ACTIVATION as in `Activation`."""
    if ACTIVATION == 0:
        y = x * tl.sigmoid(x)
    elif ACTIVATION == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:  # 0.5 * (1 + tanh(u)) = sigmoid(2 u)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == 3:
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == 4:
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    elif ACTIVATION == 5:
        y = x * tl.sigmoid(1.702 * x)
    elif ACTIVATION == 6:
        y = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    elif ACTIVATION == 8:
        y = tl.maximum(x, 0.0) + (tl.exp(tl.minimum(x, 0.0)) - 1.0)
    elif ACTIVATION == 9:
        y = tl.sigmoid(x)
    elif ACTIVATION == 10:
        y = softplus(x)
    else:
        low = tl.minimum(x, 7.0)
        y = low * tl.sigmoid(1.702 * low)
    return y


@triton.jit
def activate_times(gate, up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr = 0.0):
    """See `OpSet.activate_and_mul`; LIMIT as in `Routing`."""
    if ACTIVATION == 7:
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    factor = activate(gate, ACTIVATION)
    if LIMIT > 0.0:
        factor = tl.clamp(factor, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return factor * up
