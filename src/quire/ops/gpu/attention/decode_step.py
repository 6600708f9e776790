# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
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

from quire.ops.gpu.attention.decode import LEAST_ROWS, TO_POWERS_OF_TWO, DecodeLaunch, decode_launch
from quire.ops.gpu.attention.kv_8bit import in_words
from quire.ops.gpu.attention.kv_write import cos_and_sin, store_key_and_value, turned_heads
from quire.ops.gpu.attention.merge import finish, new_parts
from quire.ops.gpu.attention.pages import (
    Pages,
    Runs,
    Scoring,
    offset_type,
    power_of_two,
    product_type,
)
from quire.ops.gpu.attention.plan import COUNTERS, DecodePlan, load_piece
from quire.ops.gpu.attention.tile import FINITE_MIN, attend, sink
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
    -> [T, heads, head_dim], zeros for padding; or what `target` has room for: codes, where it `takes_heads_of` them.

    With `overlap`, the kernel right before this one must not be what has written runs, slots, angles or the plan: they
    are read before its end."""
    num_kv_heads, head_dim = pages.num_kv_heads, pages.head_dim
    num_tokens, num_heads = q.shape[0], q.shape[1] // head_dim
    group = num_heads // num_kv_heads
    assert q.stride(1) == k.stride(1) == v.stride(1) == 1 and q.shape[1] % (num_kv_heads * head_dim) == 0
    assert num_tokens == runs.num_seqs and plan.max_queries == 1 and plan.window == scoring.window
    target = target or Target.plain(q, num_heads * head_dim)
    rows = power_of_two(group, LEAST_ROWS)
    launch = launch or decode_launch(head_dim, rows, pages.k.dtype, runs.num_seqs)
    assert num_kv_heads <= COUNTERS
    parts = new_parts(plan, num_kv_heads, rows, head_dim)
    factor, cap = scoring.factors(pages.k_scale)
    units, codes = pages.k_units, pages.k.dtype.itemsize == 1
    k_words, v_words = in_words(pages.k), in_words(pages.v)
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
        pages.k_units,
        pages.v_units,
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
        1.0 / pages.k_scale,
        1.0 / pages.v_scale,
        pages.v_scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        angles.stride(0) if angles is not None else 0,
        pages.k.stride(0),
        pages.k.stride(1),
        pages.k.stride(2),
        units.stride(0) if units is not None else 0,
        units.stride(1) if units is not None else 0,
        units.stride(2) if units is not None else 0,
        runs.block_tables.stride(0),
        plan.counters.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=rows,
        WINDOW=scoring.window,
        CAPPED=scoring.soft_cap > 0.0,
        CODES=codes,
        FP8=pages.k.dtype == torch.float8_e4m3fn,
        OFFSETS=offset_type(k_words),
        ROTARY=angles.shape[1] if angles is not None else 0,
        BLOCK_SIZE=pages.block_size,
        BLOCK_N=launch.block_n,
        D=head_dim,
        D_PAD=power_of_two(head_dim, 32 if codes else 16),
        PRODUCTS=product_type(q, pages.k.dtype),
        OVERLAP=overlap,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **overlap_options(overlap),
    )
    return target.out.view(num_tokens, -1, head_dim)


def takes_heads_of(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, group: int) -> bool:
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
    k_units,
    v_units,
    out,
    out_units,
    part_sums,
    part_weights,
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
    v_scale,
    q_token,
    k_token,
    v_token,
    angle_token,
    kv_block,
    kv_slot,
    kv_head,
    unit_block,
    unit_slot,
    unit_head,
    table_seq,
    counter_seq,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    CODES: tl.constexpr,
    FP8: tl.constexpr,
    OFFSETS: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PRODUCTS: tl.constexpr,
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
        seq, begin, end, part, num_parts = load_piece(pieces, piece)
        context_len = tl.load(context_lens + seq)
        slot = tl.load(slots + seq)
        token = seq.to(tl.int64)
        cos, sin = cos_and_sin(angles + token * angle_token if ROTARY > 0 else None, ROTARY, D_PAD)
        if OVERLAP:
            gdc_wait()

        q_head_row = head * GROUP + row
        present = exists[:, None] & (columns < D)[None, :]
        heads = q + token * q_token + (q_head_row * D)[:, None]
        queries = turned_heads(heads, columns[None, :], present, cos, sin, q_norm, eps, ROTARY, D)
        queries = queries.to(q.dtype.element_ty).to(PRODUCTS)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        peak = tl.full([ROWS], FINITE_MIN, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if (part == num_parts - 1) & (slot >= 0):
            block = (slot // BLOCK_SIZE).to(tl.int64)
            key, value, k_unit, v_unit = store_key_and_value(
                k + token * k_token + head * D,
                v + token * v_token + head * D,
                cos,
                sin,
                k_norm,
                eps,
                k_pages,
                v_pages,
                k_units,
                v_units,
                k_factor,
                v_factor,
                block * kv_block + (slot % BLOCK_SIZE) * kv_slot + head * kv_head,
                block * unit_block + (slot % BLOCK_SIZE) * unit_slot + head * unit_head,
                ROTARY,
                D,
                D_PAD,
                FP8,
            )
            peak = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * (k_unit * factor)
            if CAPPED:
                peak = cap * (1.0 - 2.0 / (tl.exp(2.0 * peak) + 1.0))  # tanh
            total += 1.0
            acc += (value.to(tl.float32) * v_unit)[None, :]
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + q_head_row, mask=exists, other=0.0) * TO_POWERS_OF_TWO
        acc, peak, total = attend(
            acc,
            peak,
            total,
            queries,
            begin,
            tl.minimum(end, context_len - 1),
            block_tables + token * table_seq,
            k_words + head * (kv_head // PER_WORD),
            v_words + head * (kv_head // PER_WORD),
            kv_block // PER_WORD,
            kv_slot // PER_WORD,
            k_units + head * unit_head if k_units is not None else None,
            v_units + head * unit_head if v_units is not None else None,
            unit_block,
            unit_slot,
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
            OFFSETS,
            BLOCK_SIZE,
            BLOCK_N,
            ROWS,
            D,
            D_PAD,
        )
        if sinks is not None:  # in the first part alone
            score = tl.load(sinks + q_head_row, mask=exists, other=0.0) * TO_POWERS_OF_TWO
            acc, peak, total = sink(acc, peak, total, tl.where(part == 0, score, float("-inf")))
        finish(
            acc,
            peak,
            total,
            exists,
            (token * (KV_HEADS * GROUP) + q_head_row) * D,
            out,
            out_units,
            part_sums,
            part_weights,
            counters + seq * counter_seq + head,
            worker,
            head,
            part,
            num_parts,
            v_scale,
            KV_HEADS,
            ROWS,
            D,
            D_PAD,
        )
    if OVERLAP:
        gdc_wait()  # those without a piece too: whoever waits for this kernel waits for all before it
