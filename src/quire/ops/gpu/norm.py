# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""RMS and layer norms, alone, after an addition to the residual stream, and with quantized output.

Sums are fp32 over a whole row in one program, so no row sees another. The residual stream keeps its dtype: bf16 halves
its traffic and is what transformers computes with. Norms are taken of the stored (rounded) sum, so that `add_rms_norm`
is bitwise an addition followed by `rms_norm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.quantize_rows import QuantizedRows, Target, row_block, row_warps, store_columns
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs


def rms_norm(x: Tensor, weight: Tensor, eps: float, overlap: bool = False) -> Tensor:
    """x [rows, n], weight [n] -> x / sqrt(mean(x * x) + eps) * weight [rows, n]. Rows may be strided."""
    target = Target.plain(x, x.shape[1])
    _launch(x, None, weight, None, eps, target, centered=False, overlap=overlap)
    return target.out


def rms_norm_quantized(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, group: int = 0, overlap: bool = False
) -> QuantizedRows:
    """`rms_norm`, quantized to fp8, int8 or int16 with a scale for each row, or for each `group` columns."""
    target = Target.quantized(x, x.shape[1], dtype, group)
    _launch(x, None, weight, None, eps, target, centered=False, overlap=overlap)
    return target.result


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """x and residual [rows, n] -> (rms_norm(x + residual) in x's dtype, x + residual in the residual's)."""
    target = Target.plain(x, x.shape[1])
    total = _launch(x, residual, weight, None, eps, target, centered=False, overlap=overlap)
    return target.out, total


def add_rms_norm_quantized(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    group: int = 0,
    overlap: bool = False,
) -> tuple[QuantizedRows, Tensor]:
    """`add_rms_norm`, quantized as in `rms_norm_quantized`."""
    target = Target.quantized(x, x.shape[1], dtype, group)
    total = _launch(x, residual, weight, None, eps, target, centered=False, overlap=overlap)
    return target.result, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, overlap: bool = False) -> Tensor:
    """x [rows, n] -> (x - mean) / sqrt(variance + eps) * weight + bias [rows, n]"""
    target = Target.plain(x, x.shape[1])
    _launch(x, None, weight, bias, eps, target, centered=True, overlap=overlap)
    return target.out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, overlap: bool = False
) -> tuple[Tensor, Tensor]:
    """x and residual [rows, n] -> (layer_norm(x + residual) in x's dtype, x + residual in the residual's)."""
    target = Target.plain(x, x.shape[1])
    total = _launch(x, residual, weight, bias, eps, target, centered=True, overlap=overlap)
    return target.out, total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    target: Target,
    centered: bool,
    overlap: bool,
) -> Tensor:
    """-> the new residual stream, or x where there is none."""
    rows, n = x.shape
    assert x.stride(1) == 1 and weight.shape == (n,), f"x {x.shape} {x.stride()}, weight {weight.shape}"
    total = x if residual is None else residual.new_empty(rows, n)
    block = row_block(n)
    if rows:
        _norm_kernel[(rows,)](
            x,
            x if residual is None else residual,
            weight,
            weight if bias is None else bias,
            target.out,
            total,
            target.scales,
            n,
            eps,
            x.stride(0),
            0 if residual is None else residual.stride(0),
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            CENTERED=centered,
            GROUP=target.group or block,
            QUANT_MAX=target.quant_max,
            BLOCK=block,
            OVERLAP=overlap,
            num_warps=row_warps(block),
            **overlap_options(overlap),
        )
    return total


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    total_ptr,
    scale_ptr,
    n,
    eps,
    x_stride,
    residual_stride,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    GROUP: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < n
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * n + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)
    if CENTERED:
        x = tl.where(inside, x - tl.sum(x, axis=0) / n, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / n + eps) * weight
    if HAS_BIAS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    store_columns(out_ptr, scale_ptr, y, row, 0, n, GROUP, QUANT_MAX, BLOCK)
