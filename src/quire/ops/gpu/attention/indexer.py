# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The indexer of sparse attention (DSA): its keys go to pages, and the cached keys of a sequence are scored.

A program scores some positions of one token: the token's heads are the rows of a matmul, and their dot products with a
key are added up, weighted. How a step is divided changes no score. Scores are stored as integers of the same order,
which `select_slots` takes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.kv_write import E4M3_MAX
from quire.ops.gpu.attention.pages import dot_type, next_power_of_two, num_programs, offset_type
from quire.ops.gpu.attention.top_k import SeenPositions, select_slots

SCORE_BYTES = 2**27  # of the scores that are computed before positions are chosen by them
PROGRAMS_PER_MULTIPROCESSOR = 8  # started at once, of which two or three run: contexts differ in length
MIN_ROWS = 16  # of a matmul


def write_index_key(k: Tensor, angles: Tensor | None, slots: Tensor, page: Tensor) -> None:
    """k [T, columns], of which the first are rotated by angles [T, r] (cos, then sin), goes to page [blocks,
    block_size, columns] at slots [T]. A negative slot is padding."""
    num_tokens, columns = k.shape
    assert k.stride(1) == page.stride(2) == 1 and page.shape[2] == columns
    _write_key[(num_tokens,)](
        k,
        k.stride(0),
        angles,
        0 if angles is None else angles.stride(0),
        slots,
        page,
        page.stride(0),
        page.stride(1),
        COLUMNS=columns,
        PAD=next_power_of_two(columns),
        HALF=0 if angles is None else angles.shape[1] // 2,
        BLOCK_SIZE=page.shape[1],
        FP8=page.dtype == torch.float8_e4m3fn,
        num_warps=1,
        enable_fp_fusion=False,  # rounded where the specification rounds, so that both store the same numbers
    )


def choose_slots(q: Tensor, weights: Tensor, angles: Tensor | None, page: Tensor, seen: SeenPositions) -> Tensor:
    """-> [T, top_k] int32: the slots of the positions that tokens attend to, as `select_slots` has them"""
    out = torch.empty(len(q), seen.top_k, dtype=torch.int32, device=q.device)
    at_once = max(SCORE_BYTES // (4 * seen.width), 1)
    for first in range(0, len(q), at_once):
        tokens = range(first, min(first + at_once, len(q)))
        select_slots(score_positions(q, weights, angles, page, seen, tokens), seen, tokens, out)
    return out


def score_positions(
    q: Tensor, weights: Tensor, angles: Tensor | None, page: Tensor, seen: SeenPositions, tokens: range
) -> Tensor:
    """q [T, heads * columns], rotated by angles [T, r], weights [T, heads] -> [tokens, seen.width] int32, in the order
    of the scores. Those of tokens that see at most `seen.top_k` positions are not computed."""
    heads, columns = weights.shape[1], page.shape[2]
    assert q.stride(1) == weights.stride(1) == page.stride(2) == 1 and q.shape[1] == heads * columns
    block_n, warps, stages = (32, 4, 2) if q.dtype == torch.float32 else (128, 4, 3)
    tiles = -(-seen.width // block_n)
    splits = num_programs(q.device, PROGRAMS_PER_MULTIPROCESSOR, len(tokens) * tiles) // len(tokens)
    out = torch.empty(len(tokens), seen.width, dtype=torch.int32, device=q.device)
    _score[(len(tokens), max(splits, 1))](
        q,
        q.stride(0),
        weights,
        weights.stride(0),
        angles,
        0 if angles is None else angles.stride(0),
        page,
        page.stride(0),
        page.stride(1),
        seen.args(),
        out,
        out.stride(0),
        tokens.start,
        HEADS=heads,
        ROWS=next_power_of_two(heads, MIN_ROWS),
        COLUMNS=columns,
        PAD=next_power_of_two(columns, MIN_ROWS),
        HALF=0 if angles is None else angles.shape[1] // 2,
        TOP_K=seen.top_k,
        BLOCK_SIZE=page.shape[1],
        BLOCK_N=block_n,
        OFFSET_TYPE=offset_type(page),
        DOT_TYPE=dot_type(q, page.dtype),
        num_warps=warps,
        num_stages=stages,
    )
    return out


@triton.jit
def _rotated(rows, column, angles, inside, HALF: tl.constexpr):
    """-> numbers `column` of `rows` in fp32, of which the first 2 * HALF are rotated by pairs."""
    x = tl.load(rows + column, mask=inside, other=0.0).to(tl.float32)
    if HALF > 0:
        is_first = column < HALF
        paired = column < 2 * HALF
        other = tl.where(is_first, column + HALF, tl.where(paired, column - HALF, column))
        y = tl.load(rows + other, mask=inside, other=0.0).to(tl.float32)
        cos = tl.load(angles + column % HALF, mask=paired, other=1.0)
        sin = tl.load(angles + HALF + column % HALF, mask=paired, other=0.0)
        rotated = tl.where(is_first, x * cos - y * sin, x * cos + y * sin)
        x = tl.where(paired, rotated, x)
    return x


@triton.jit
def _write_key(
    k,
    k_token,
    angles,
    angle_token,
    slots,
    page,
    page_block,
    page_slot,
    COLUMNS: tl.constexpr,
    PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    column = tl.arange(0, PAD)
    inside = (column < COLUMNS) & (slot >= 0)
    own = None
    if HALF > 0:
        own = angles + token * angle_token
    x = _rotated(k + token * k_token, column, own, inside, HALF)
    if FP8:
        x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    row = page + (slot // BLOCK_SIZE).to(tl.int64) * page_block + (slot % BLOCK_SIZE) * page_slot
    tl.store(row + column, x.to(page.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first_token"])
def _score(
    q,
    q_token,
    weights,
    weight_token,
    angles,
    angle_token,
    page,
    page_block,
    page_slot,
    seen,  # SeenArgs
    out,
    out_row,
    first_token,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAD: tl.constexpr,
    HALF: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    token = first_token + tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    length = tl.load(seen.lengths + token)
    length = tl.where(length > TOP_K, length, 0)  # else all are chosen
    if first < length:
        lane = tl.arange(0, BLOCK_N)
        head = tl.arange(0, ROWS)
        column = tl.arange(0, PAD)[None, :]
        is_column = column < COLUMNS
        own = None
        if HALF > 0:
            own = angles + token * angle_token
        heads = q + token * q_token + head[:, None] * COLUMNS
        queries = _rotated(heads, column, own, (head < HEADS)[:, None] & is_column, HALF)
        queries = queries.to(q.dtype.element_ty).to(DOT_TYPE)
        weight = tl.load(weights + token * weight_token + head, mask=head < HEADS, other=0.0).to(tl.float32)[:, None]
        table = seen.tables + tl.load(seen.owners + token).to(tl.int64) * seen.table_stride
        step = tl.num_programs(1) * BLOCK_N
        block = tl.load(table + (first + lane) // BLOCK_SIZE, mask=first + lane < length, other=0)
        for start in range(first, length, step):
            pos = start + lane
            inside = pos < length
            row = (block.to(OFFSET_TYPE) * page_block + (pos % BLOCK_SIZE) * page_slot)[:, None]
            keys = tl.load(page + row + column, mask=inside[:, None] & is_column, other=0.0).to(DOT_TYPE)
            dots = tl.dot(queries, tl.trans(keys), input_precision="ieee")  # [ROWS, BLOCK_N]
            score = tl.sum(tl.where(dots < 0.0, 0.0, dots) * weight, 0)
            tl.store(out + tl.program_id(0).to(tl.int64) * out_row + pos, _ordered(score), mask=inside)
            block = tl.load(table + (pos + step) // BLOCK_SIZE, mask=pos + step < length, other=0)


@triton.jit
def _ordered(x):
    """fp32 -> int32 of the same order. NaN is below all numbers, as -inf is; 0 and -0 are equal."""
    x = tl.where(x == x, tl.where(x == 0.0, 0.0, x), float("-inf"))
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
