# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = w @ x for one row x and weights in groups of 4-bit codes, in integers.

x comes as 16-bit integers with a scale for every group (`quant_rows`). The processor multiplies two of them by two
bytes and adds both to a sum in one instruction; a word of eight codes is eight bytes after three. So a code costs 7/8
of an instruction, and a group's sum is exact. A warp takes 4 chunks of inputs at a time, 8 lanes a chunk, 4 words a
lane. What a lane has of x serves `block_n / warps` outputs. Sums stay in the lanes until the end."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.torch.kernels.overlap import overlap_options, wait_for_inputs
from quire.ops.torch.kernels.quant_layout import GroupedWeight
from quire.ops.torch.kernels.quant_rows import PAIRED, Quantized

WIDTH = tl.constexpr(32)  # words of a chunk: PAIRED inputs
CHUNKS = tl.constexpr(4)  # a step
LANES = tl.constexpr(8)  # that share a chunk
WORDS = tl.constexpr(4)  # a lane
REGISTERS = 128  # of a thread, at most: two programs of 8 warps on a multiprocessor


class GroupedGemvConfig(NamedTuple):
    block_n: int  # outputs a program
    warps: int  # 8 at least: a tensor with fewer elements than there are threads is loaded as it is wanted
    depth: int  # steps whose weights are on their way


def can_gemv(weight: GroupedWeight) -> bool:
    return weight.by_output is not None and weight.chunk == PAIRED and weight.group >= 32


def grouped_gemv(
    x: Quantized,
    weight: GroupedWeight,
    bias: Tensor | None,
    config: GroupedGemvConfig,
    dtype: torch.dtype = torch.bfloat16,
    overlap: bool = False,
) -> Tensor:
    """x one row of 16-bit codes in groups of `x_group(weight)` -> [1, N]"""
    N, chunks, scales = weight.num_outputs, len(weight.words), weight.by_output
    assert len(x.codes) == 1 and x.codes.shape[1] == chunks * PAIRED and can_gemv(weight) and scales is not None
    assert weight.words.numel() < 2**31  # places have 32 bits
    has_offsets = len(scales.shape) == 3
    out = torch.empty(1, N, dtype=dtype, device=x.codes.device)
    _grouped_gemv_kernel[(triton.cdiv(N, config.block_n),)](
        x.codes.view(torch.int32),
        x.scales,
        weight.words,
        scales.view(torch.int32) if has_offsets else scales,
        bias,
        out,
        N,
        chunks,
        scales.shape[1],
        GROUP=weight.group,
        ZERO=weight.zero,
        HAS_OFFSETS=has_offsets,
        BLOCK_N=config.block_n,
        DEPTH=config.depth,
        ONCE=chunks <= CHUNKS.value * config.depth,
        ASM=not triton.knobs.runtime.interpret,
        OVERLAP=overlap,
        num_warps=config.warps,
        maxnreg=REGISTERS,
        **overlap_options(overlap),
    )
    return out


def x_group(weight: GroupedWeight) -> int:
    """Inputs that share a scale of x: no more than share a sum."""
    return min(weight.group, PAIRED)


# The compiler deals elements out to lanes along the axis on which memory seems contiguous. For scales that must be the
# second one, as it is for words; `max_contiguous` says so. It is not true, and does no harm: as nothing is known of
# `num_groups`, every element might begin anywhere, and each is loaded by itself.
@triton.jit(do_not_specialize=["num_groups"])
def _grouped_gemv_kernel(
    pairs_ptr,
    unit_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    chunks,
    num_groups,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPTH: tl.constexpr,
    ONCE: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, N - 1)  # those past the end are computed and never stored
    ahead = ()
    for d in tl.static_range(DEPTH):
        loaded = _load(words_ptr, scale_ptr, d * CHUNKS, chunks, rows, N, num_groups, GROUP)
        ahead = appended(ahead, loaded)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, CHUNKS * LANES), tl.float32)
    for begin in range(0, chunks, CHUNKS * DEPTH):
        following = ()
        for d in tl.static_range(DEPTH):
            first = begin + d * CHUNKS
            sums = _add_step(sums, ahead[d], pairs_ptr, unit_ptr, first, chunks, GROUP, ZERO, HAS_OFFSETS, ASM)
            if not ONCE:
                loaded = _load(words_ptr, scale_ptr, first + DEPTH * CHUNKS, chunks, rows, N, num_groups, GROUP)
                following = appended(following, loaded)
        if not ONCE:
            ahead = following
    y = tl.sum(sums, axis=1)
    inside = outputs < N
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + outputs, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load(words_ptr, scale_ptr, first, chunks, rows, N, num_groups, GROUP: tl.constexpr):
    """Words of chunks first .. first + CHUNKS, [n, CHUNKS * WIDTH], and for every group of a chunk the scales,
    [n, CHUNKS * LANES]. Past the last chunk words are anything: their scales are 0."""
    column = tl.arange(0, CHUNKS * WIDTH)
    chunk = (column // WIDTH + first)[None, :]
    at = (chunk * N + rows[:, None]) * WIDTH + (column % WIDTH)[None, :]
    words = tl.load(words_ptr + at, mask=chunk < chunks)
    GROUPS: tl.constexpr = max(8 * WIDTH // GROUP, 1)
    chunk = (tl.arange(0, CHUNKS * LANES) // LANES + first)[None, :]
    scales = ()
    for number in tl.static_range(GROUPS):
        at = rows[:, None] * num_groups + (chunk * GROUPS // max(GROUP // (8 * WIDTH), 1) + number)
        at = tl.max_contiguous(at, (1, 2))
        scales = appended(scales, tl.load(scale_ptr + at, mask=chunk < chunks, other=0))
    return words, scales


@triton.jit
def _add_step(
    sums,
    loaded,
    pairs_ptr,
    unit_ptr,
    first,
    chunks,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ASM: tl.constexpr,
):
    words, scales = loaded
    BLOCK_N: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = max(8 * WIDTH // GROUP, 1)
    column = tl.arange(0, CHUNKS * WIDTH)
    at = tl.minimum(column // WIDTH + first, chunks - 1) * (4 * WIDTH) + column % WIDTH
    x = ()
    for kind in tl.static_range(4):
        x = appended(x, tl.load(pairs_ptr + at + kind * WIDTH)[None, :])
    low = words & 0x0F0F0F0F
    high = (words >> 4) & 0x0F0F0F0F
    chunk = tl.minimum(tl.arange(0, CHUNKS * LANES) // LANES + first, chunks - 1)
    for number in tl.static_range(GROUPS):
        unit = tl.load(unit_ptr + chunk * GROUPS + number)[None, :]
        x_sum = tl.load(unit_ptr + (chunks + chunk) * GROUPS + number)[None, :] / LANES
        part = _products(x, low, high, number, GROUPS, ASM)
        part = tl.sum(tl.reshape(part, (BLOCK_N, CHUNKS * LANES, WORDS)), axis=2).to(tl.float32) * unit
        if HAS_OFFSETS:
            sums += part * _half(scales[number], 0)
            sums += x_sum * _half(scales[number], 16)
        else:
            sums += (part - ZERO * x_sum) * scales[number].to(tl.float32)
    return sums


@triton.jit
def appended(values, value):
    return values + (value,)  # noqa: RUF005 (the compiler knows no other way)


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    return (word >> SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _products(x, low, high, NUMBER: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr):
    """What of the words belongs to the group, times x: all of it, two bytes, a byte, or half of one."""
    part = tl.zeros(low.shape, tl.int32)
    if GROUPS == 1:
        part = dot2(x[0], low, part, False, ASM)
        part = dot2(x[1], low, part, True, ASM)
        part = dot2(x[2], high, part, False, ASM)
        part = dot2(x[3], high, part, True, ASM)
    else:
        UPPER: tl.constexpr = NUMBER * 2 // GROUPS
        SECOND: tl.constexpr = NUMBER * 4 // GROUPS % 2
        MASK: tl.constexpr = -1 if GROUPS == 2 else (-65536 if SECOND == 1 else 0xFFFF)
        if GROUPS < 8 or NUMBER % 2 == 0:
            part = dot2(x[UPPER] & MASK, low, part, UPPER == 1, ASM)
        if GROUPS < 8 or NUMBER % 2 == 1:
            part = dot2(x[2 + UPPER] & MASK, high, part, UPPER == 1, ASM)
    return part


@triton.jit
def dot2(x, codes, total, UPPER: tl.constexpr, ASM: tl.constexpr):
    """total + the two 16-bit integers of x times two bytes of the codes, the lower or the upper ones"""
    if ASM:
        if UPPER:
            total = tl.inline_asm_elementwise(
                "dp2a.hi.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [x, codes, total], tl.int32, is_pure=True, pack=1
            )
        else:
            total = tl.inline_asm_elementwise(
                "dp2a.lo.s32.u32 $0, $1, $2, $3;", "=r,r,r,r", [x, codes, total], tl.int32, is_pure=True, pack=1
            )
    else:
        shift: tl.constexpr = 16 if UPPER else 0
        total += ((x << 16) >> 16) * ((codes >> shift) & 255) + (x >> 16) * ((codes >> (shift + 8)) & 255)
    return total
