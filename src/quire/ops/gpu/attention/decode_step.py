# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Steps in which every sequence has one token: `kv_write` and `decode` in one kernel.

Between two kernels that each take a few microseconds, most of the time is waiting: for the one before, then for one
address after the other. Here where the work lies is found out while the projection is still being computed, and the
new token's key meets its query before it has gone through memory. A row begins with what the new token gives it, and
walks over the older ones. It is rounded as it is stored, so it does not matter that it was not read."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.attention.decode import EXP2_SCALE, MIN_TILE_ROWS, DecodeLaunch, decode_launch
from quire.ops.gpu.attention.kv_8bit import as_words
from quire.ops.gpu.attention.kv_write import cos_and_sin, load_rotated_heads, store_kv
from quire.ops.gpu.attention.merge import finish, new_partials
from quire.ops.gpu.attention.pages import (
    Pages,
    Runs,
    Scoring,
    dot_type,
    next_power_of_two,
    offset_type,
)
from quire.ops.gpu.attention.plan import MAX_ROW_TILES, DecodePlan, load_piece
from quire.ops.gpu.attention.tile import FINITE_MIN, add_sink, attend
from quire.ops.gpu.linear.quantize_rows import PAIRED, Target
from quire.ops.gpu.overlap import overlap_options


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    slots: Tensor,
    pages: Pages,
    runs: Runs,
    plan: DecodePlan,
    scoring: Scoring,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    launch: DecodeLaunch | None = None,
    overlap: bool = False,
    target: Target | None = None,
) -> Tensor:
    """Arguments as in `kv_write`, of sequences of one token each; padding has slot -1 and no context
    -> [T, heads, head_dim], zeros for padding; or quantized into `target`, see `can_write_quantized`.

    With `overlap`, the kernel right before this one must not be what has written runs, slots, angles or the plan: they
    are read before its end."""
    num_kv_heads, head_dim = pages.num_kv_heads, pages.head_dim
    num_tokens, num_heads = q.shape[0], q.shape[1] // head_dim
    group = num_heads // num_kv_heads
    assert q.stride(1) == k.stride(1) == v.stride(1) == 1 and q.shape[1] % (num_kv_heads * head_dim) == 0
    assert num_tokens == runs.num_seqs and plan.max_queries == 1 and plan.window == scoring.window
    target = target or Target.plain(q, num_heads * head_dim)
    rows = next_power_of_two(group, MIN_TILE_ROWS)
    launch = launch or decode_launch(head_dim, rows, pages.k.dtype, runs.num_seqs)
    assert num_kv_heads <= MAX_ROW_TILES
    parts = new_partials(plan, num_kv_heads, rows, head_dim)
    factor, cap = scoring.factors(pages.k_fp8_scale)
    scales, codes = pages.k_scales, pages.k.dtype.itemsize == 1
    k_words, v_words = as_words(pages.k), as_words(pages.v)
    _decode_step[(plan.workers * num_kv_heads,)](
        q,
        k,
        v,
        angles,
        slots,
        q_norm,
        k_norm,
        eps,
        pages.k,
        pages.v,
        k_words,
        v_words,
        pages.k_scales,
        pages.v_scales,
        target.out,
        target.scales,
        parts.sums,
        parts.weights,
        plan.counters,
        plan.pieces,
        plan.ranges,
        runs.context_lens,
        runs.block_tables,
        scoring.slopes,
        scoring.sinks,
        factor,
        cap,
        1.0 / pages.k_fp8_scale,
        1.0 / pages.v_fp8_scale,
        pages.v_fp8_scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        angles.stride(0) if angles is not None else 0,
        pages.k.stride(0),
        pages.k.stride(1),
        pages.k.stride(2),
        scales.stride(0) if scales is not None else 0,
        scales.stride(1) if scales is not None else 0,
        scales.stride(2) if scales is not None else 0,
        runs.block_tables.stride(0),
        plan.counters.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=rows,
        WINDOW=scoring.window,
        CAPPED=scoring.soft_cap > 0.0,
        CODES=codes,
        FP8=pages.k.dtype == torch.float8_e4m3fn,
        OFFSET_TYPE=offset_type(k_words),
        ROTARY=angles.shape[1] if angles is not None else 0,
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
    return target.out.view(num_tokens, -1, head_dim)


def can_write_quantized(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, group: int) -> bool:
    """Whether `decode_step` gives such codes: every head is a group, and there is no more to a row than heads."""
    return dtype == torch.int16 and num_tokens == 1 and group == head_dim and num_heads * head_dim % PAIRED == 0


@triton.jit
def _decode_step(
    q,
    k,
    v,
    angles,
    slots,
    q_norm,
    k_norm,
    eps,
    k_pages,
    v_pages,
    k_words,
    v_words,
    k_scales,
    v_scales,
    out,
    out_units,
    partial_acc,
    partial_ml,
    counters,
    pieces,
    ranges,
    context_lens,
    block_tables,
    slopes,
    sinks,
    factor,
    cap,
    k_factor,
    v_factor,
    v_fp8_scale,
    q_token,
    k_token,
    v_token,
    angle_token,
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
    CAPPED: tl.constexpr,
    CODES: tl.constexpr,
    FP8: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DOT_TYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_launch_dependents()
    PER_WORD: tl.constexpr = 2 if CODES else 1
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, D_PAD)
    exists = row < GROUP
    worker = tl.program_id(0) // KV_HEADS  # the KV heads of a position lie side by side and are read at the same time
    head = tl.program_id(0) % KV_HEADS
    for piece in range(tl.load(ranges + 2 * worker), tl.load(ranges + 2 * worker + 1)):
        seq, begin, end, split, num_splits = load_piece(pieces, piece)
        context_len = tl.load(context_lens + seq)
        slot = tl.load(slots + seq)
        token = seq.to(tl.int64)
        cos, sin = cos_and_sin(angles + token * angle_token if ROTARY > 0 else None, ROTARY, D_PAD)
        if OVERLAP:
            gdc_wait()

        q_head_row = head * GROUP + row
        present = exists[:, None] & (columns < D)[None, :]
        heads = q + token * q_token + (q_head_row * D)[:, None]
        queries = load_rotated_heads(heads, columns[None, :], present, cos, sin, q_norm, eps, ROTARY, D)
        queries = queries.to(q.dtype.element_ty).to(DOT_TYPE)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        m = tl.full([ROWS], FINITE_MIN, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        if (split == num_splits - 1) & (slot >= 0):
            block = (slot // BLOCK_SIZE).to(tl.int64)
            key, value, key_scale, value_scale = store_kv(
                k + token * k_token + head * D,
                v + token * v_token + head * D,
                cos,
                sin,
                k_norm,
                eps,
                k_pages,
                v_pages,
                k_scales,
                v_scales,
                k_factor,
                v_factor,
                block * kv_block + (slot % BLOCK_SIZE) * kv_slot + head * kv_head,
                block * scale_block + (slot % BLOCK_SIZE) * scale_slot + head * scale_head,
                ROTARY,
                D,
                D_PAD,
                FP8,
            )
            m = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * (key_scale * factor)
            if CAPPED:
                m = cap * (1.0 - 2.0 / (tl.exp(2.0 * m) + 1.0))  # tanh
            l += 1.0
            acc += (value.to(tl.float32) * value_scale)[None, :]
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + q_head_row, mask=exists, other=0.0) * EXP2_SCALE
        acc, m, l = attend(
            acc,
            m,
            l,
            queries,
            begin,
            tl.minimum(end, context_len - 1),
            block_tables + token * table_seq,
            k_words + head * (kv_head // PER_WORD),
            v_words + head * (kv_head // PER_WORD),
            kv_block // PER_WORD,
            kv_slot // PER_WORD,
            k_scales + head * scale_head if k_scales is not None else None,
            v_scales + head * scale_head if v_scales is not None else None,
            scale_block,
            scale_slot,
            tl.zeros([ROWS], tl.int32) + (context_len - 1),
            slope,
            None,
            None,
            0,
            None,
            factor,
            cap,
            True,
            WINDOW,
            0,
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
            (token * (KV_HEADS * GROUP) + q_head_row) * D,
            out,
            out_units,
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
    if OVERLAP:
        gdc_wait()  # those without a piece too: whoever waits for this kernel waits for all before it
