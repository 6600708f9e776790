# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Rows of activations quantized to 8 or 16 bits with scales, by the kernel that computes the rows.

x is about scale * q, scale = max|x| / QUANT_MAX: 448 for fp8 (e4m3), 127 for int8, 32767 for int16. There is one scale
a row, or one for every `group` neighbouring columns. A group with nothing above 2**-100 is stored as zeros. A group
that holds NaN has a NaN scale, one that holds an infinity an infinite one: what is not finite stays so.

int16 is for grouped_gemv.py: half a step is 2**-16 of the greatest of its group, and bf16 itself rounds by up to 2**-9.
Beside each scale lies the sum of the group. Of every 256 columns, column 32 p + i belongs to plane p of word i of a
chunk of weights (grouped_layout.py); the values of planes p and p + 2, whose weights are neighbouring bytes, lie side
by side: planes 0 and 2 for all i, then 4 and 6, 1 and 3, 5 and 7.

fp16 is for grouped_few.py, with powers of two as scales, and `group` is then the width of a plane of weights
(few_fragments.py)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.linear.few_fragments import SCALE_WORDS, TOKENS, UNIT, store_fragments
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

QUANT_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0, torch.int16: 32767.0, torch.float16: 65504.0}
PAIRED = 256  # columns among which int16 values are paired; int16 rows are padded to it with zeros
PAIRS = tl.constexpr(PAIRED)
MAX_BLOCK = 32768  # columns that a program holds in registers


class QuantizedRows(NamedTuple):
    q: Tensor  # [rows, n] float8_e4m3fn, int8 or int16; fp16 in an order of its own
    scales: Tensor  # [rows, n / group] fp32; of int16 [rows, n / group, 2]: scales, and sums of columns; of fp16 both


class Target(NamedTuple):
    """Where a kernel writes its rows, plain or quantized: the tensors, and the kernel's constants."""

    out: Tensor  # [rows, n]
    scales: Tensor  # [rows, n / group]; `out` where nothing is quantized
    group: int  # columns that share a scale, a power of two; 0: the whole row
    quant_max: float  # 0: not quantized

    @classmethod
    def plain(cls, x: Tensor, n: int) -> "Target":
        """The rows without quantization: as many as x has, in its dtype."""
        out = x.new_empty(len(x), n)
        return cls(out, out, 0, 0.0)

    @classmethod
    def quantized(cls, x: Tensor, n: int, dtype: torch.dtype, group: int) -> "Target":
        assert group & (group - 1) == 0 and (group == 0 or n % group == 0), f"groups of {group} in rows of {n}"
        if dtype == torch.float16:
            assert n % UNIT == 0, f"{n} columns"
            tiles = -(-len(x) // TOKENS)
            q = x.new_empty(tiles * TOKENS, n, dtype=dtype)[: len(x)]
            scales = x.new_empty(tiles, n // UNIT, SCALE_WORDS, dtype=torch.float32)
        elif dtype == torch.int16:
            padded = -(-n // PAIRED) * PAIRED
            q = x.new_empty(len(x), padded, dtype=dtype)
            scales = x.new_empty(len(x), padded // group, 2, dtype=torch.float32)
        else:
            q = x.new_empty(len(x), n, dtype=dtype)
            scales = x.new_empty(len(x), n // group if group else 1, dtype=torch.float32)
        return cls(q, scales, group, QUANT_MAX[dtype])

    @property
    def result(self) -> QuantizedRows:
        return QuantizedRows(self.out, self.scales)


def quantize_rows(x: Tensor, dtype: torch.dtype, group: int = 0, overlap: bool = False) -> QuantizedRows:
    """x [rows, n] -> quantized rows and scales. Rows may be strided; the last axis may not."""
    rows, n = x.shape
    target = Target.quantized(x, n, dtype, group)
    block = row_block(n)
    _quantize_kernel[(rows,)](
        x,
        target.out,
        target.scales,
        n,
        x.stride(0),
        GROUP=group or block,
        QUANT_MAX=target.quant_max,
        BLOCK=block,
        OVERLAP=overlap,
        num_warps=row_warps(block),
        **overlap_options(overlap),
    )
    return target.result


def row_block(n: int) -> int:
    """The power of two that holds a row of n."""
    block = max(int(triton.next_power_of_2(n)), PAIRED)
    assert block <= MAX_BLOCK, f"a row of {n} columns does not fit one program"
    return block


def row_warps(block: int) -> int:
    """Threads take 16 columns each: two loads of 16 bytes in flight, and few enough warps to meet in one barrier."""
    return min(max(block // 512, 1), 16)


@triton.jit
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    n,
    x_stride,
    GROUP: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait_for_inputs(OVERLAP)
    x = tl.load(x_ptr + row * x_stride + columns, mask=columns < n, other=0.0).to(tl.float32)
    store_columns(out_ptr, scale_ptr, x, row, 0, n, GROUP, QUANT_MAX, BLOCK)


@triton.jit
def store_columns(
    out_ptr, scale_ptr, y, row, first, n, GROUP: tl.constexpr, QUANT_MAX: tl.constexpr, BLOCK: tl.constexpr
):
    """Columns first .. first + BLOCK of a row of n. Columns past n must be 0 in y."""
    columns = first + tl.arange(0, BLOCK)
    if QUANT_MAX == 0.0:
        tl.store(out_ptr + row * n + columns, y, mask=columns < n)
    elif out_ptr.dtype.element_ty == tl.float16:
        store_fragments(out_ptr, scale_ptr, y, row, first, n, GROUP, BLOCK)
    else:
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        q, scales = quantize_groups(tl.reshape(y, (BLOCK // GROUP, GROUP)), QUANT_MAX, dtype)
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        if dtype == tl.int16:
            padded = tl.cdiv(n, PAIRS) * PAIRS
            num_groups = padded // GROUP
            offsets = row * padded + paired_index(columns)
            tl.store(out_ptr + offsets, tl.reshape(q, (BLOCK,)).to(dtype), mask=columns < padded)
            pair_ptr = scale_ptr + (row * num_groups + group) * 2
            tl.store(pair_ptr, scales, mask=group < num_groups)
            tl.store(pair_ptr + 1, tl.sum(q, axis=1) * scales, mask=group < num_groups)
        else:
            tl.store(out_ptr + row * n + columns, tl.reshape(q, (BLOCK,)).to(dtype), mask=columns < n)
            num_groups = tl.cdiv(n, GROUP)
            tl.store(scale_ptr + row * num_groups + group, scales, mask=group < num_groups)


@triton.jit
def quantize_groups(groups, QUANT_MAX: tl.constexpr, dtype: tl.constexpr):
    """groups [g, n] fp32 -> values rounded for the type, still in fp32, and the scale of every group"""
    abs_max = tl.reduce(tl.abs(groups), 1, _greater_or_nan)
    nonzero = ~(abs_max < 7.888609052210118e-31)  # 2**-100; NaN counts as nonzero
    inverse = tl.where(nonzero, QUANT_MAX / tl.where(nonzero, abs_max, 1.0), 0.0)
    q = groups * inverse[:, None]
    if dtype != tl.float8e4nv:
        q = (q + 12582912.0) - 12582912.0  # 1.5 * 2**23 leaves no bits below one: round half to even
    return q, tl.where(nonzero, abs_max / QUANT_MAX, 0.0)


@triton.jit
def paired_index(columns):
    """Where the int16 values of these columns lie."""
    plane = columns // 32 % 8
    kind = plane % 2 * 2 + plane // 4
    return columns // PAIRS * PAIRS + (kind * 32 + columns % 32) * 2 + plane // 2 % 2


@triton.jit
def _greater_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
