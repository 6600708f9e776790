# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""y = w @ x for one row x and weights in groups of 4-bit codes, without tensor cores.

A word of eight codes, all but one of them masked out, is a tiny fp32 number as it stands (a denormal one): the code
times 2**(4 * plane - 149). It is multiplied by an input that has been made greater by as much, so a code costs two
instructions, its mask and its product, and nothing is rounded but the sums. Only the upper three planes are shifted
down first: the numbers would have an exponent. Inputs from 2**40 on would overflow; activations are far below."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.torch.kernels.linear_splits import finish, split_space
from quire.ops.torch.kernels.overlap import overlap_options, wait_for_inputs
from quire.ops.torch.kernels.quant_layout import GroupedWeight

# Inputs are multiplied by 2**(RAISED - 4 * plane), sums by 2**(149 - RAISED): both are finite.
RAISED = 84
LOWERED = tl.constexpr(2.0 ** (149 - RAISED))
FACTORS = tl.constexpr(tuple(2.0 ** (RAISED - 4 * plane) for plane in range(5)))


class GroupedGemvConfig(NamedTuple):
    block_n: int  # outputs a program
    splits: int  # of K
    warps: int


def can_gemv(weight: GroupedWeight) -> bool:
    return weight.bits == 4 and not weight.table


def grouped_gemv(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None,
    config: GroupedGemvConfig,
    tickets: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """x [1, K] bf16 or fp16 -> [1, N]"""
    (M, K), N = x.shape, weight.num_outputs
    assert weight.scales.numel() < 2**31 and N * weight.width < 2**31
    assert M == 1 and weight.num_inputs == K and x.stride(1) == 1 and can_gemv(weight)
    out = x.new_empty(1, N)
    tiles = triton.cdiv(N, config.block_n)
    partials, tickets = split_space(out, tiles, config.block_n, config.splits, tickets)
    _grouped_gemv_kernel[(tiles, config.splits, 1)](
        x,
        weight.words,
        weight.scales,
        weight.offsets,
        x if bias is None else bias,
        out,
        partials,
        tickets,
        N,
        K,
        len(weight.words),
        GROUP=weight.group,
        WIDTH=weight.width,
        ZERO=weight.zero,
        HAS_BIAS=bias is not None,
        WHOLE_CHUNKS=K % weight.chunk == 0,
        SPLITS=config.splits,
        BLOCK_N=config.block_n,
        OVERLAP=overlap,
        num_warps=config.warps,
        **overlap_options(overlap),
    )
    return out


@triton.jit
def _grouped_gemv_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    ticket_ptr,
    N,
    K,
    chunks,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, N - 1)  # those past the end are computed and never stored
    columns = tl.arange(0, WIDTH)
    split_chunks = tl.cdiv(chunks, SPLITS)
    first = tl.program_id(1) * split_chunks
    last = tl.minimum(first + split_chunks, chunks)
    places = words_ptr + (rows[:, None] * WIDTH + columns[None, :])
    ahead = tl.load(places + tl.cast(first, tl.int64) * N * WIDTH, mask=first < last, other=0)
    wait_for_inputs(OVERLAP)
    sums = tl.zeros((BLOCK_N, WIDTH), tl.float32)
    for chunk in range(first, last):
        words = ahead
        ahead = tl.load(places + tl.cast(chunk + 1, tl.int64) * N * WIDTH, mask=chunk + 1 < last, other=0)
        tl.debug_barrier()  # else the assembler asks for them when it needs them
        sums = _add_chunk(
            sums, words, x_ptr, scale_ptr, offset_ptr, chunk, columns, rows, N, K, GROUP, WIDTH, ZERO, WHOLE_CHUNKS
        )
    total = tl.sum(sums, axis=1)[:, None]
    finish(total, out_ptr, bias_ptr, partial_ptr, ticket_ptr, outputs, tl.arange(0, 1), N, 1, HAS_BIAS, SHARES=SPLITS)


@triton.jit
def _add_chunk(
    sums,
    words,
    x_ptr,
    scale_ptr,
    offset_ptr,
    chunk,
    columns,
    rows,
    N,
    K,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    WHOLE_CHUNKS: tl.constexpr,
):
    """8 planes of WIDTH inputs: GROUPS groups, or a part of one."""
    GROUPS: tl.constexpr = max(8 * WIDTH // GROUP, 1)
    upper = words >> 12
    for number in tl.static_range(GROUPS):
        group = (chunk * 8 * WIDTH // GROUP + number) * N + rows  # 32 bits: there are fewer scales than that
        part = tl.zeros_like(sums)
        x_sums = tl.zeros((1, WIDTH), tl.float32)
        for plane in tl.static_range(number * 8 // GROUPS, (number + 1) * 8 // GROUPS):
            k = ((chunk * 8 + plane) * WIDTH + columns)[None, :]
            if WHOLE_CHUNKS:
                x = tl.load(x_ptr + k).to(tl.float32)
            else:
                x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            x_sums += x
            if plane < 5:
                code = words & (15 << 4 * plane)
                part += code.to(tl.float32, bitcast=True) * (x * FACTORS[plane])
            else:
                code = upper & (15 << 4 * (plane - 3))
                part += code.to(tl.float32, bitcast=True) * (x * FACTORS[plane - 3])
        scales = tl.load(scale_ptr + group).to(tl.float32)
        sums += part * (scales * LOWERED)[:, None]
        if offset_ptr is not None:
            sums += tl.load(offset_ptr + group).to(tl.float32)[:, None] * x_sums
        elif ZERO != 0:
            sums -= (scales * ZERO)[:, None] * x_sums
    return sums
