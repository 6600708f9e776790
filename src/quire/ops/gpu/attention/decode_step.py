# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Steps in which every sequence has one token: `kv_write` and `decode` in one kernel.

Kernels of a few microseconds spend most of their time waiting: for the kernel before, then for one address after the
other. Here programs look up their work while the projection is still being computed, and the new token's key meets its
query before it has gone through memory. A row begins with the new token, then takes the older positions. The new key
and value are rounded as they are stored, so it makes no difference that they were not read back."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.gpu.attention.decode import MIN_TILE_ROWS, DecodeLaunch, decode_launch
from quire.ops.gpu.attention.kv_write import load_cos_sin, load_rotated_heads, projection_args, store_kv
from quire.ops.gpu.attention.merge import finish_piece, new_partials
from quire.ops.gpu.attention.pages import (
    Pages,
    Runs,
    Scoring,
    dot_type,
    next_power_of_two,
    offset_type,
)
from quire.ops.gpu.attention.plan import MAX_ROW_TILES, DecodePlan, first_seen, load_piece
from quire.ops.gpu.attention.tile import EXP2_SCALE, FINITE_MIN, add_sink, attend
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
    assert q.shape[1] % (num_kv_heads * head_dim) == 0 and num_kv_heads <= MAX_ROW_TILES
    assert num_tokens == runs.num_seqs and plan.max_queries == 1 and plan.window == scoring.window
    target = target or Target.plain(q, num_heads * head_dim)
    rows = next_power_of_two(group, MIN_TILE_ROWS)
    launch = launch or decode_launch(head_dim, rows, pages.k.dtype, runs.num_seqs)
    args = pages.args()
    _decode_step[(plan.workers * num_kv_heads,)](
        projection_args(q, k, v, angles, slots, q_norm, k_norm, eps),
        pages.store_args(),
        args,
        runs.args(),
        plan.args(),
        scoring.args(pages.k_fp8_scale),
        new_partials(plan, num_kv_heads, rows, head_dim),
        target.out,
        target.scales,
        pages.v_fp8_scale,
        KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=rows,
        WINDOW=scoring.window,
        FP8=pages.is_fp8,
        OFFSET_TYPE=offset_type(args.k),
        ROTARY=angles.shape[1] if angles is not None else 0,
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
    return target.out.view(num_tokens, -1, head_dim)


def can_write_quantized(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, group: int) -> bool:
    """Whether `decode_step` can quantize its output so: every head is a group, and rows need no padding."""
    return dtype == torch.int16 and num_tokens == 1 and group == head_dim and num_heads * head_dim % PAIRED == 0


@triton.jit
def _decode_step(
    x,  # ProjectionArgs
    store,  # StoreArgs
    pages,  # PageArgs
    runs,  # RunArgs
    plan,  # DecodePlanArgs
    score,  # ScoreArgs
    partials,  # PartialSoftmax
    out,
    out_scales,
    v_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
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
    row = tl.arange(0, ROWS)
    columns = tl.arange(0, D_PAD)
    exists = row < GROUP
    worker = tl.program_id(0) // KV_HEADS  # the KV heads of a position lie side by side and are read at the same time
    kv_head = tl.program_id(0) % KV_HEADS
    for piece in range(tl.load(plan.ranges + 2 * worker), tl.load(plan.ranges + 2 * worker + 1)):
        seq, begin, end, split, num_splits = load_piece(plan.pieces, piece)
        context_len = tl.load(runs.context_lens + seq)
        slot = tl.load(x.slots + seq)
        token = seq.to(tl.int64)
        cos, sin = load_cos_sin(x, token, ROTARY, D_PAD)
        if OVERLAP:
            gdc_wait()

        head = kv_head * GROUP + row
        present = exists[:, None] & (columns < D)[None, :]
        heads = x.q + token * x.q_token + (head * D)[:, None]
        queries = load_rotated_heads(heads, columns[None, :], present, cos, sin, x.q_norm, x.eps, ROTARY, D)
        queries = queries.to(x.q.dtype.element_ty).to(DOT_TYPE)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        m = tl.full([ROWS], FINITE_MIN, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        if (split == num_splits - 1) & (slot >= 0):
            key, value, key_scale, value_scale = store_kv(
                x, store, token, kv_head, slot, cos, sin, ROTARY, BLOCK_SIZE, D, D_PAD, FP8
            )
            m = tl.sum(queries.to(tl.float32) * key.to(tl.float32)[None, :], 1) * (key_scale * score.qk_scale)
            if score.cap is not None:
                m = score.cap * (1.0 - 2.0 / (tl.exp(2.0 * m) + 1.0))  # tanh
            l += 1.0
            acc += (value.to(tl.float32) * value_scale)[None, :]
        slope = None
        if score.slopes is not None:
            slope = tl.load(score.slopes + head, mask=exists, other=0.0) * EXP2_SCALE
        acc, m, l = attend(
            acc,
            m,
            l,
            queries,
            begin,
            tl.minimum(end, context_len - 1),
            first_seen(tl.maximum(context_len - 1, 0), WINDOW),
            runs.block_tables + token * runs.table_stride,
            pages,
            kv_head,
            tl.zeros([ROWS], tl.int32) + (context_len - 1),
            slope,
            None,
            None,
            0,
            None,
            score,
            True,
            WINDOW,
            0,
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
            (token * (KV_HEADS * GROUP) + head) * D,
            out,
            out_scales,
            partials,
            plan.counters + seq * plan.counter_stride + kv_head,
            worker,
            kv_head,
            split,
            num_splits,
            v_scale,
            KV_HEADS,
            D,
        )
    if OVERLAP:
        gdc_wait()  # programs without a piece too: a kernel that waits for this one waits for all before it
