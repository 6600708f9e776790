# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Attention of steps in which a sequence has one query token, or a few (drafts).

Programs stay on the device, each with its share of all contexts (attention_plan.py): some hundred of them, whatever the
step holds. attention_merge.py puts together what they leave of contexts that several of them share."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.kv_8bit import as_words
from quire.ops.gpu.attention.merge import finish, new_partials, zero_padding
from quire.ops.gpu.attention.pages import (
    LOG2E,
    Pages,
    Runs,
    Scoring,
    dot_type,
    next_power_of_two,
    offset_type,
)
from quire.ops.gpu.attention.plan import MAX_ROW_TILES, MIN_SPLIT_LENGTH, DecodePlan, load_piece
from quire.ops.gpu.attention.tile import FINITE_MIN, add_sink, attend
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs

EXP2_SCALE = tl.constexpr(LOG2E)
MAX_TREE_DRAFTS = 64  # bits of a word
MIN_TILE_ROWS = 16  # of a tile that matrix units take
MAX_SMALL_BATCH = 8  # sequences


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    block_n: int  # positions a program loads at once
    num_warps: int
    num_stages: int
    per_multiprocessor: int  # programs that fit side by side


def decode_launch(
    head_dim: int, rows: int, dtype: torch.dtype, num_seqs: int, with_prompts: bool = False
) -> DecodeLaunch:
    """About 100 KB of K and V are on their way to each multiprocessor. More programs of fewer warps wait less for each
    other; codes, which are unpacked between two waits, want the most of them. `with_prompts` is for `decode`, which
    reads 16 bits at 4.3 TB/s so and at 3.4 as others do; for `decode_step` it is the other way round.

    A few sequences are split into `MIN_SPLIT_LENGTH` positions each, loaded in one or two rounds: what counts is latency,
    and that the next kernels find room beside them."""
    position_bytes = 2 * next_power_of_two(head_dim, 16) * dtype.itemsize
    if num_seqs <= MAX_SMALL_BATCH and rows == MIN_TILE_ROWS:
        if dtype.itemsize == 1:
            return DecodeLaunch(MIN_SPLIT_LENGTH // 2, num_warps=4, num_stages=2, per_multiprocessor=3)
        return DecodeLaunch(_positions(65536 // position_bytes), num_warps=8, num_stages=1, per_multiprocessor=2)
    if rows > MIN_TILE_ROWS or (with_prompts and dtype.itemsize == 2):
        return DecodeLaunch(_positions(32768 // position_bytes), num_warps=4, num_stages=3, per_multiprocessor=3)
    if dtype.itemsize == 1:
        return DecodeLaunch(_positions(4096 // position_bytes), num_warps=1, num_stages=5, per_multiprocessor=8)
    return DecodeLaunch(_positions(16384 // position_bytes), num_warps=2, num_stages=4, per_multiprocessor=4)


def _positions(wanted: int) -> int:
    return max(16, min(MIN_SPLIT_LENGTH, wanted))


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

    `tree` [T] int64 makes drafts a tree: bit j of a token's word says that it sees the j-th token of its run (its
    ancestors and itself). `positions` [T] int32 are then the tokens' depths in the text."""
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // pages.num_kv_heads
    assert q.stride(2) == 1 and group * pages.num_kv_heads == num_heads and head_dim == pages.head_dim
    assert plan.window == scoring.window, f"planned for a window of {plan.window}, not {scoring.window}"
    assert tree is None or (positions is not None and plan.max_queries <= MAX_TREE_DRAFTS)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    rows = next_power_of_two(group * plan.max_queries, MIN_TILE_ROWS)
    launch = launch or decode_launch(head_dim, rows, pages.k.dtype, runs.num_seqs)
    assert pages.num_kv_heads <= MAX_ROW_TILES
    parts = new_partials(plan, pages.num_kv_heads, rows, head_dim)
    factor, cap = scoring.factors(pages.k_fp8_scale)
    scales = pages.k_scales
    codes = pages.k.dtype.itemsize == 1
    k, v = as_words(pages.k), as_words(pages.v)
    _decode[(plan.workers * pages.num_kv_heads,)](
        q,
        k,
        v,
        pages.k_scales,
        pages.v_scales,
        out,
        parts.sums,
        parts.weights,
        plan.counters,
        plan.pieces,
        plan.ranges,
        runs.seq_starts,
        runs.context_lens,
        runs.block_tables,
        scoring.slopes,
        scoring.sinks,
        scoring.biases,
        tree,
        positions,
        runs.num_seqs,
        num_tokens,
        factor,
        cap,
        pages.v_fp8_scale,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        k.stride(0),
        k.stride(1),
        k.stride(2),
        scales.stride(0) if scales is not None else 0,
        scales.stride(1) if scales is not None else 0,
        scales.stride(2) if scales is not None else 0,
        runs.block_tables.stride(0),
        plan.counters.stride(0),
        KV_HEADS=pages.num_kv_heads,
        GROUP=group,
        ROWS=rows,
        WINDOW=scoring.window,
        REACH=scoring.reach,
        CAPPED=scoring.soft_cap > 0.0,
        CODES=codes,
        OFFSET_TYPE=offset_type(k),
        BLOCK_SIZE=pages.block_size,
        BLOCK_N=launch.block_n,
        D=head_dim,
        D_PAD=next_power_of_two(head_dim, 32 if codes else 16),
        DOT_TYPE=dot_type(q, pages.k.dtype),
        OVERLAP=overlap,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **overlap_options(overlap),
    )
    return out


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _decode(
    q,
    k,
    v,
    k_scales,
    v_scales,
    out,
    partial_acc,
    partial_ml,
    counters,
    pieces,
    ranges,
    seq_starts,
    context_lens,
    block_tables,
    slopes,
    sinks,
    biases,
    tree,
    positions,
    num_seqs,
    num_tokens,
    factor,
    cap,
    v_fp8_scale,
    q_token,
    q_head,
    out_token,
    out_head,
    kv_block,
    kv_slot,
    kv_head,
    scale_block,
    scale_slot,
    scale_head,
    table_seq,
    counter_seq,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    CODES: tl.constexpr,
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
    query = row // GROUP
    worker = tl.program_id(0) // KV_HEADS  # the KV heads of a position lie side by side and are read at the same time
    head = tl.program_id(0) % KV_HEADS
    for piece in range(tl.load(ranges + 2 * worker), tl.load(ranges + 2 * worker + 1)):
        seq, begin, end, split, num_splits = load_piece(pieces, piece)
        token = tl.load(seq_starts + seq)
        num_queries = tl.load(seq_starts + seq + 1) - token
        context_len = tl.load(context_lens + seq)

        run_begin = context_len - num_queries
        exists = query < num_queries
        q_head_row = head * GROUP + row % GROUP
        q_at = (token + query).to(tl.int64) * q_token + q_head_row * q_head
        rows = tl.load(
            q + q_at[:, None] + columns[None, :], mask=exists[:, None] & (columns < D)[None, :], other=0.0
        ).to(DOT_TYPE)
        query_pos = run_begin + query
        ancestors = None
        if tree is not None:
            ancestors = tl.load(tree + token + query, mask=exists, other=0)
            query_pos = tl.load(positions + token + query, mask=exists, other=0)
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + q_head_row, mask=exists, other=0.0) * EXP2_SCALE
        bias = None
        if biases is not None:
            bias = biases + q_head_row * (2 * REACH + 1) + REACH

        acc, m, l = attend(
            tl.zeros([ROWS, D_PAD], tl.float32),
            tl.full([ROWS], FINITE_MIN, tl.float32),
            tl.zeros([ROWS], tl.float32),
            rows,
            begin,
            end,
            block_tables + seq.to(tl.int64) * table_seq,
            k + head * kv_head,
            v + head * kv_head,
            kv_block,
            kv_slot,
            k_scales + head * scale_head if k_scales is not None else None,
            v_scales + head * scale_head if v_scales is not None else None,
            scale_block,
            scale_slot,
            query_pos,
            slope,
            bias,
            ancestors,
            run_begin,
            positions + token if tree is not None else None,
            factor,
            cap,
            True,
            WINDOW,
            REACH,
            CAPPED,
            CODES,
            OFFSET_TYPE,
            BLOCK_SIZE,
            BLOCK_N,
            ROWS,
            D,
            D_PAD,
        )
        if sinks is not None:  # in the first part alone
            score = tl.load(sinks + q_head_row, mask=exists, other=0.0) * EXP2_SCALE
            acc, m, l = add_sink(acc, m, l, tl.where(split == 0, score, float("-inf")))
        finish(
            acc,
            m,
            l,
            exists,
            (token + query).to(tl.int64) * out_token + q_head_row * out_head,
            out,
            None,
            partial_acc,
            partial_ml,
            counters + seq * counter_seq + head,
            worker,
            head,
            split,
            num_splits,
            v_fp8_scale,
            KV_HEADS,
            ROWS,
            D,
            D_PAD,
        )
    first_padding = tl.load(seq_starts + num_seqs)
    zero_padding(out, first_padding, num_tokens, out_token, out_head, KV_HEADS * GROUP, D, D_PAD)
