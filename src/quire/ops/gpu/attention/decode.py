# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Attention of sequences with one query token in the step, or a few (draft tokens).

Programs are persistent, each with its share of all contexts (plan.py): some hundred of them, whatever the step holds.
merge.py merges the partial softmaxes of contexts that several programs share."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.merge import finish_piece, new_partials, zero_padding
from quire.ops.gpu.attention.pages import (
    Pages,
    Runs,
    Scoring,
    dot_type,
    head_args,
    next_power_of_two,
    offset_type,
)
from quire.ops.gpu.attention.plan import MAX_ROW_TILES, MIN_SPLIT_LENGTH, DecodePlan, first_seen, load_piece
from quire.ops.gpu.attention.tile import EXP2_SCALE, FINITE_MIN, add_sink, attend, count_bits
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs
from quire.ops.opset import WORD_BITS

MAX_TREE_TOKENS = WORD_BITS
MIN_TILE_ROWS = 16  # that tensor cores take
MAX_TILE_ROWS = 64  # of 4 warps; the queries of a tree that are more become several tiles
MAX_SMALL_BATCH = 8  # sequences


def tile_rows(group: int, max_queries: int) -> int:
    """Rows of a tile: those of all queries of a KV head, or as many as one program takes well."""
    rows = next_power_of_two(group * max_queries, MIN_TILE_ROWS)
    return min(rows, max(MAX_TILE_ROWS, next_power_of_two(group)))


def num_tiles(group: int, max_queries: int) -> int:
    """How many tiles the queries of a KV head take."""
    return -(-max_queries // (tile_rows(group, max_queries) // group))


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    block_n: int  # positions a program loads at once
    num_warps: int
    num_stages: int
    per_multiprocessor: int  # programs that fit side by side


def decode_launch(
    head_dim: int, rows: int, dtype: torch.dtype, num_seqs: int, with_prompts: bool = False
) -> DecodeLaunch:
    """About 100 KB of K and V are in flight to each multiprocessor. A program waits for one address after the other, so
    many programs of one warp are the fastest, as long as a warp has registers for the sums. `with_prompts` is for
    `decode`: it reads 16-bit pages at 4.3 TB/s that way and at 3.4 otherwise. For `decode_step` it is the other way
    round.

    A few sequences are split into `MIN_SPLIT_LENGTH` positions each, loaded in one round or two: what counts is
    latency, and that the next kernels find room on the device."""
    position_bytes = 2 * next_power_of_two(head_dim, 16) * dtype.itemsize
    if rows > MAX_TILE_ROWS:  # acc takes up to half of the registers
        return DecodeLaunch(_clamp_block_n(16384 // position_bytes), num_warps=8, num_stages=2, per_multiprocessor=1)
    if num_seqs <= MAX_SMALL_BATCH and rows == MIN_TILE_ROWS:
        if dtype.itemsize == 1:
            return DecodeLaunch(MIN_SPLIT_LENGTH // 2, num_warps=4, num_stages=2, per_multiprocessor=3)
        return DecodeLaunch(_clamp_block_n(65536 // position_bytes), num_warps=8, num_stages=1, per_multiprocessor=2)
    if rows > MIN_TILE_ROWS or (with_prompts and dtype.itemsize == 2):
        return DecodeLaunch(_clamp_block_n(32768 // position_bytes), num_warps=4, num_stages=3, per_multiprocessor=3)
    if head_dim > 256:
        return DecodeLaunch(_clamp_block_n(16384 // position_bytes), num_warps=2, num_stages=4, per_multiprocessor=4)
    if head_dim > 128:
        return DecodeLaunch(32, num_warps=2, num_stages=2, per_multiprocessor=8)
    if position_bytes > 256:
        return DecodeLaunch(32, num_warps=1, num_stages=2, per_multiprocessor=16)
    return DecodeLaunch(32, num_warps=1, num_stages=3, per_multiprocessor=8)


def _clamp_block_n(positions: int) -> int:
    return max(16, min(MIN_SPLIT_LENGTH, positions))


def decode(
    q: Tensor,
    pages: Pages,
    runs: Runs,
    plan: DecodePlan,
    scoring: Scoring,
    *,
    tree: Tensor | None = None,
    positions: Tensor | None = None,
    out: Tensor | None = None,
    launch: DecodeLaunch | None = None,
    overlap: bool = False,
) -> Tensor:
    """q [T, heads, head_dim] -> out, of the same shape and type, for tokens of the sequences that `plan` serves. Tokens
    of no sequence get zeros; tokens of longer runs are left as they are.

    `tree` [T] int64 makes drafts a tree (`StepBatch.ancestors`): bit j of a token's word says that it sees the j-th
    place of the tree (its ancestors and itself). `positions` [T] int32 are then the tokens' depths in the text."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // pages.num_kv_heads
    assert q.stride(2) == 1 and group * pages.num_kv_heads == num_heads and head_dim == pages.head_dim
    assert plan.window == scoring.window, f"planned for a window of {plan.window}, not {scoring.window}"
    assert tree is None or (positions is not None and plan.max_queries <= MAX_TREE_TOKENS)
    tiles, rows = num_tiles(group, plan.max_queries), tile_rows(group, plan.max_queries)
    assert pages.num_kv_heads * tiles <= MAX_ROW_TILES
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    launch = launch or decode_launch(head_dim, rows, pages.k.dtype, runs.num_seqs)
    args = pages.args()
    _decode[(plan.workers * pages.num_kv_heads * tiles,)](
        head_args(q),
        head_args(out),
        args,
        runs.args(),
        plan.args(),
        scoring.args(pages.k_fp8_scale),
        new_partials(plan, pages.num_kv_heads * tiles, rows, head_dim),
        tree,
        positions,
        runs.num_seqs,
        num_tokens,
        pages.v_fp8_scale,
        KV_HEADS=pages.num_kv_heads,
        GROUP=group,
        TILES=tiles,
        ROWS=rows,
        WINDOW=scoring.window,
        REACH=scoring.reach,
        OFFSET_TYPE=offset_type(args.k),
        BLOCK_SIZE=pages.block_size,
        BLOCK_N=launch.block_n,
        D=head_dim,
        D_PAD=pages.padded_head_dim,
        DOT_TYPE=dot_type(q, pages.k.dtype),
        OVERLAP=overlap,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **overlap_options(overlap),
    )
    return out


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _decode(
    q,  # HeadArgs
    out,  # HeadArgs
    pages,  # PageArgs
    runs,  # RunArgs
    plan,  # DecodePlanArgs
    score,  # ScoreArgs
    partials,  # PartialSoftmax
    tree,
    positions,
    num_seqs,
    num_tokens,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, D_PAD)
    LANES: tl.constexpr = KV_HEADS * TILES
    QUERIES: tl.constexpr = ROWS // GROUP  # of a tile
    worker = tl.program_id(0) // LANES  # the KV heads of a position lie side by side and are read at the same time
    lane = tl.program_id(0) % LANES
    kv_head = lane // TILES
    tile = lane % TILES
    query = tile * QUERIES + row // GROUP
    for piece in range(tl.load(plan.ranges + 2 * worker), tl.load(plan.ranges + 2 * worker + 1)):
        seq, begin, end, split, num_splits = load_piece(plan.pieces, piece)
        token = tl.load(runs.seq_starts + seq)
        num_queries = tl.load(runs.seq_starts + seq + 1) - token
        context_len = tl.load(runs.context_lens + seq)

        run_begin = context_len - num_queries
        exists = query < num_queries
        if TILES > 1:
            exists = exists & (row < QUERIES * GROUP)
            end = tl.where(tile * QUERIES < num_queries, end, begin)
        head = kv_head * GROUP + row % GROUP
        q_offset = (token + query).to(tl.int64) * q.token + head * q.head
        queries = tl.load(
            q.ptr + q_offset[:, None] + columns[None, :], mask=exists[:, None] & (columns < D)[None, :], other=0.0
        ).to(DOT_TYPE)
        query_pos = run_begin + query
        ancestors = None
        if tree is not None:
            ancestors = tl.load(tree + token + query, mask=exists, other=0)
            query_pos = tl.load(positions + token + query, mask=exists, other=0)
            run_begin = tl.load(positions + token) + 1 - count_bits(tl.load(tree + token))
        slope = None
        if score.slopes is not None:
            slope = tl.load(score.slopes + head, mask=exists, other=0.0) * EXP2_SCALE
        bias = None
        if score.biases is not None:
            bias = score.biases + head * (2 * REACH + 1) + REACH

        acc, m, l = attend(
            tl.zeros([ROWS, D_PAD], tl.float32),
            tl.full([ROWS], FINITE_MIN, tl.float32),
            tl.zeros([ROWS], tl.float32),
            queries,
            begin,
            end,
            first_seen(tl.min(tl.where(exists, query_pos, context_len)), WINDOW),
            runs.block_tables + seq.to(tl.int64) * runs.table_stride,
            pages,
            kv_head,
            query_pos,
            slope,
            bias,
            ancestors,
            run_begin,
            None,
            score,
            True,
            WINDOW,
            REACH,
            OFFSET_TYPE,
            BLOCK_SIZE,
            BLOCK_N,
            D,
        )
        if score.sinks is not None:  # in the first split alone
            sink = tl.load(score.sinks + head, mask=exists, other=0.0) * EXP2_SCALE
            acc, m, l = add_sink(acc, m, l, tl.where(split == 0, sink, float("-inf")))
        finish_piece(
            acc,
            m,
            l,
            exists,
            (token + query).to(tl.int64) * out.token + head * out.head,
            out.ptr,
            None,
            partials,
            plan.counters + seq * plan.counter_stride + lane,
            worker,
            lane,
            split,
            num_splits,
            v_scale,
            LANES,
            D,
        )
    first_padding = tl.load(runs.seq_starts + num_seqs)
    zero_padding(out, first_padding, num_tokens, KV_HEADS * GROUP, D, D_PAD)
