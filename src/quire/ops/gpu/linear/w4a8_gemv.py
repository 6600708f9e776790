# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""W4A8 for one row, without tensor cores: fp8 values become 16-bit integers, which grouped_gemv.py multiplies.

Integers are the values times a power of two that is a group's own. An fp8 value has four bits, so of those up to 2**-11
of the greatest of 128 nothing is lost, and of the others less than 2**-15 of it.

Of every 256 columns, column 32 p + 4 j + e belongs to plane p of quad j (`shuffle_words`). The values of two
neighbouring columns, whose weights are neighbouring bytes, lie side by side: those of planes 0 and 2, then of 1 and 3,
of 4 and 6, and of 5 and 7."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.grouped import gemv_config
from quire.ops.gpu.linear.grouped_gemv import can_gemv, grouped_gemv
from quire.ops.gpu.linear.grouped_layout import GroupedWeight
from quire.ops.gpu.linear.quantize_rows import PAIRED, QuantizedRows
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

GROUP = tl.constexpr(128)
CHUNK = tl.constexpr(PAIRED)
MIN_MAX = tl.constexpr(2.0**-9)  # the least fp8 value


def can_gemv_shuffled(weight: GroupedWeight) -> bool:
    return can_gemv(weight) and weight.group >= 128


def w4a8_gemv(
    x: QuantizedRows, weight: GroupedWeight, bias: Tensor | None, dtype: torch.dtype, overlap: bool = False
) -> Tensor:
    """x one row in fp8 -> [1, N]"""
    assert len(x.q) == 1 and can_gemv_shuffled(weight)
    return grouped_gemv(as_int16(x, overlap), weight, bias, gemv_config(weight), dtype, overlap, shuffled=True)


def as_int16(x: QuantizedRows, overlap: bool = False) -> QuantizedRows:
    """One row: fp8 with a scale [1, 1] -> int16 with scales and sums of 128 columns [1, groups, 2], in pairs"""
    columns = x.q.shape[1]
    chunks = triton.cdiv(columns, PAIRED)
    q = torch.empty(1, chunks * PAIRED, dtype=torch.int16, device=x.q.device)
    scales = torch.empty(1, 2 * chunks, 2, dtype=torch.float32, device=x.q.device)
    _as_int16_kernel[(chunks,)](
        x.q, x.scales, q, scales, columns, OVERLAP=overlap, num_warps=1, **overlap_options(overlap)
    )
    return QuantizedRows(q, scales)


@triton.jit
def _as_int16_kernel(x_ptr, x_scale_ptr, out_ptr, scale_ptr, n, OVERLAP: tl.constexpr):
    inside = tl.arange(0, CHUNK)
    columns = tl.program_id(0) * CHUNK + inside
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
    groups = tl.reshape(x, (CHUNK // GROUP, GROUP))
    greatest = tl.maximum(tl.max(tl.abs(groups), axis=1), MIN_MAX)
    exponent = (greatest.to(tl.int32, bitcast=True) >> 23) - 127  # greatest < 2 ** (exponent + 1)
    up = ((127 + 14 - exponent) << 23).to(tl.float32, bitcast=True)
    down = ((127 - 14 + exponent) << 23).to(tl.float32, bitcast=True)
    q = groups * up[:, None]
    q = (q + 12582912.0) - 12582912.0  # 1.5 * 2**23 leaves no bits below one: round half to even
    plane, e = inside // 32, inside % 4
    kind, word = plane // 4 * 2 + plane % 2, plane % 4 // 2 * 2 + e // 2
    place = (kind * 32 + inside % 32 // 4 * 4 + word) * 2 + e % 2
    tl.store(out_ptr + tl.program_id(0) * CHUNK + place, tl.reshape(q, (CHUNK,)).to(tl.int16))
    scales = down * tl.load(x_scale_ptr)
    pairs = scale_ptr + (tl.program_id(0) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)) * 2
    tl.store(pairs, scales)
    tl.store(pairs + 1, tl.sum(q, axis=1) * scales)
