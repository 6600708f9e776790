# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = w @ x for one row x and weights in groups of 4-bit codes, in integers.

x comes as 16-bit integers with a scale for every group (`quant_rows`). The processor multiplies two of them by two
bytes and adds both to a sum in one instruction; a word of eight codes is eight bytes after three. So a code costs 7/8
of an instruction, and a group's sum is exact. A lane has an output of its own and the words of a chunk, 64 bytes, to
itself; a warp has 32 outputs, and the chunks are dealt out to the warps of a program. Nothing is exchanged but the sums
at the end. `tiles` blocks of 32 outputs use the same x, which every lane must read."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.torch.kernels.linear_splits import finish, split_space
from quire.ops.torch.kernels.overlap import overlap_options, wait_for_inputs
from quire.ops.torch.kernels.quant_layout import GroupedWeight
from quire.ops.torch.kernels.quant_rows import PAIRED, Quantized

LANES = tl.constexpr(32)
WIDTH = tl.constexpr(16)  # words of a chunk: PAIRED inputs


class GroupedGemvConfig(NamedTuple):
    tiles: int  # of 32 outputs a program: 1, 2 or 4
    warps: int  # that share the inputs
    splits: int  # of the inputs, one a program
    depth: int  # chunks of a warp that are on their way


def can_gemv(weight: GroupedWeight) -> bool:
    return weight.bits == 4 and not weight.table and weight.chunk == PAIRED and weight.group >= 32


def grouped_gemv(
    x: Quantized,
    weight: GroupedWeight,
    bias: Tensor | None,
    config: GroupedGemvConfig,
    dtype: torch.dtype = torch.bfloat16,
    tickets: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """x one row of 16-bit codes in groups of `x_group(weight)` -> [1, N]"""
    N, chunks = weight.num_outputs, len(weight.words)
    assert len(x.codes) == 1 and x.codes.shape[1] == chunks * PAIRED and can_gemv(weight)
    assert weight.scales.numel() < 2**31 and N * WIDTH.value < 2**31
    out = torch.empty(1, N, dtype=dtype, device=x.codes.device)
    block = config.tiles * LANES.value
    tiles = triton.cdiv(N, block)
    partials, tickets = split_space(out, tiles, block, config.splits, tickets)
    _grouped_gemv_kernel[(tiles, config.splits, 1)](
        x.codes.view(torch.int32),
        x.scales,
        weight.words,
        weight.scales,
        weight.offsets,
        out if bias is None else bias,
        out,
        partials,
        tickets,
        N,
        chunks,
        GROUP=weight.group,
        ZERO=weight.zero,
        HAS_BIAS=bias is not None,
        SPLITS=config.splits,
        TILES=config.tiles,
        WARPS=config.warps,
        DEPTH=config.depth,
        ASM=not triton.knobs.runtime.interpret,
        OVERLAP=overlap,
        num_warps=config.warps,
        **overlap_options(overlap),
    )
    return out


def x_group(weight: GroupedWeight) -> int:
    """Inputs that share a scale of x: no more than share a sum."""
    return min(weight.group, PAIRED)


@triton.jit
def _grouped_gemv_kernel(
    pairs_ptr,
    unit_ptr,
    words_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    ticket_ptr,
    N,
    chunks,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    DEPTH: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    block = tl.program_id(0) * TILES * LANES
    split_chunks = tl.cdiv(chunks, SPLITS)
    first = tl.program_id(1) * split_chunks
    last = tl.minimum(first + split_chunks, chunks)
    mine = first + tl.arange(0, WARPS)
    ahead = ()
    for d in tl.static_range(DEPTH):
        ahead = ahead + (_load(words_ptr, scale_ptr, offset_ptr, mine + d * WARPS, last, block, N, GROUP, TILES),)  # noqa: RUF005
    wait_for_inputs(OVERLAP)
    sums = ()
    for _ in tl.static_range(TILES):
        sums = sums + (tl.zeros((WARPS, LANES), tl.float32),)  # noqa: RUF005
    for begin in range(first, last, WARPS * DEPTH):
        following = ()
        for d in tl.static_range(DEPTH):
            chunk = begin + d * WARPS + tl.arange(0, WARPS)
            sums = _add_chunk(sums, ahead[d], pairs_ptr, unit_ptr, chunk, chunks, last, GROUP, ZERO, TILES, ASM)
            following = following + (  # noqa: RUF005
                _load(words_ptr, scale_ptr, offset_ptr, chunk + DEPTH * WARPS, last, block, N, GROUP, TILES),
            )
        ahead = following
    outputs = block + tl.arange(0, TILES * LANES)
    total = _stack(sums, TILES)[:, None]
    finish(total, out_ptr, bias_ptr, partial_ptr, ticket_ptr, outputs, tl.arange(0, 1), N, 1, HAS_BIAS, SHARES=SPLITS)


@triton.jit
def _load(words_ptr, scale_ptr, offset_ptr, chunk, last, block, N, GROUP: tl.constexpr, TILES: tl.constexpr):
    """A chunk of every warp: its words by tiles and quarters, and the scales and offsets of its groups.

    Past the last chunk words are anything: their scales are 0."""
    GROUPS: tl.constexpr = max(8 * WIDTH // GROUP, 1)
    words, scales, offsets = (), (), ()
    inside = (chunk < last)[:, None]
    for tile in tl.static_range(TILES):
        rows = tl.minimum(block + tile * LANES + tl.arange(0, LANES), N - 1)  # past the end: computed, never stored
        places = (chunk.to(tl.int64) * N)[:, None] + rows[None, :]
        for quarter in tl.static_range(4):
            at = places[:, :, None] * WIDTH + (4 * quarter + tl.arange(0, 4))[None, None, :]
            words = words + (tl.load(words_ptr + at, mask=inside[:, :, None]),)  # noqa: RUF005
        for number in tl.static_range(GROUPS):
            group = (chunk * (8 * WIDTH) // GROUP + number)[:, None] * N + rows[None, :]
            scales = scales + (tl.load(scale_ptr + group, mask=inside, other=0.0),)  # noqa: RUF005
            if offset_ptr is not None:
                offsets = offsets + (tl.load(offset_ptr + group, mask=inside, other=0.0),)  # noqa: RUF005
    return words, scales, offsets


@triton.jit
def _add_chunk(
    sums,
    loaded,
    pairs_ptr,
    unit_ptr,
    chunk,
    chunks,
    last,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    TILES: tl.constexpr,
    ASM: tl.constexpr,
):
    words, scales, offsets = loaded
    GROUPS: tl.constexpr = max(8 * WIDTH // GROUP, 1)
    inside = chunk < last
    parts = ()
    for _ in tl.static_range(TILES * GROUPS):
        parts = parts + (tl.zeros((inside.shape[0], LANES, 4), tl.int32),)  # noqa: RUF005
    for quarter in tl.static_range(4):
        at = (tl.minimum(chunk, chunks - 1) * (4 * WIDTH) + 4 * quarter)[:, None, None] + tl.arange(0, 4)[None, None, :]
        x = ()
        for kind in tl.static_range(4):
            x = x + (tl.load(pairs_ptr + at + kind * WIDTH),)  # noqa: RUF005
        more = ()
        for tile in tl.static_range(TILES):
            word = words[4 * tile + quarter]
            low = word & 0x0F0F0F0F
            high = (word >> 4) & 0x0F0F0F0F
            for number in tl.static_range(GROUPS):
                part = parts[tile * GROUPS + number]
                part = _add_words(part, x, low, high, number, GROUPS, ASM)
                more = more + (part,)  # noqa: RUF005
        parts = more
    results = ()
    for tile in tl.static_range(TILES):
        total = sums[tile]
        for number in tl.static_range(GROUPS):
            unit_at = unit_ptr + chunk * GROUPS + number
            unit = tl.load(unit_at, mask=inside, other=0.0)[:, None]
            x_sum = tl.load(unit_at + chunks * GROUPS, mask=inside, other=0.0)[:, None]
            part = tl.sum(parts[tile * GROUPS + number], axis=2).to(tl.float32) * unit
            if ZERO != 0:
                part -= ZERO * x_sum
            total += part * scales[tile * GROUPS + number].to(tl.float32)
            if len(offsets) != 0:
                total += offsets[tile * GROUPS + number].to(tl.float32) * x_sum
        results = results + (total,)  # noqa: RUF005
    return results


@triton.jit
def _add_words(part, x, low, high, NUMBER: tl.constexpr, GROUPS: tl.constexpr, ASM: tl.constexpr):
    """The lower and upper halves of a word's bytes, or what of them belongs to the group: two bytes, or one."""
    if GROUPS == 1:
        part = dot2(x[0], low, part, False, ASM)
        part = dot2(x[1], low, part, True, ASM)
        part = dot2(x[2], high, part, False, ASM)
        part = dot2(x[3], high, part, True, ASM)
    else:
        UPPER: tl.constexpr = NUMBER * 2 // GROUPS
        MASK: tl.constexpr = -1 if GROUPS == 2 else (0xFFFF if NUMBER % 2 == 0 else -65536)
        part = dot2(x[UPPER] & MASK, low, part, UPPER == 1, ASM)
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


@triton.jit
def _stack(sums, TILES: tl.constexpr):
    """TILES of [warps, LANES] -> [TILES * LANES]"""
    if TILES == 1:
        total = tl.sum(sums[0], axis=0)
    elif TILES == 2:
        total = tl.reshape(tl.trans(tl.join(tl.sum(sums[0], axis=0), tl.sum(sums[1], axis=0))), (2 * LANES,))
    else:
        even = tl.join(tl.sum(sums[0], axis=0), tl.sum(sums[1], axis=0))
        odd = tl.join(tl.sum(sums[2], axis=0), tl.sum(sums[3], axis=0))
        total = tl.reshape(tl.permute(tl.join(even, odd), (2, 1, 0)), (4 * LANES,))
    return total
