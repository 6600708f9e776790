# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Attention of prompts and of chunks of prompts, sequences of different lengths in one launch.

A program takes a tile of neighbouring query tokens of one sequence, all the query heads of one KV head, and walks over
the pages they see. Only the tiles that a row's own position or window cuts through are masked. Which tile of keys comes
after which depends on positions alone, so a prompt in chunks gives the same bits as a whole one.

Decoding tokens can go through it as well, as tiles with one token in them. Where rows are to be batch invariant all of
them do, in one loop that masks every tile: the same instructions whatever is in the tile beside a row."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.kv_8bit import as_words
from quire.ops.gpu.attention.pages import LOG2E, Pages, Runs, Scoring, dot_type, next_power_of_two, offset_type
from quire.ops.gpu.attention.plan import PrefillPlan, find_sequence
from quire.ops.gpu.attention.tile import FINITE_MIN, add_sink, attend

EXP2_SCALE = tl.constexpr(LOG2E)


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    rows: int  # of a tile: its tokens times the heads that share a KV head
    block_n: int  # positions a round
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread: 128 let two programs of 8 warps share a multiprocessor
    uniform: bool = False  # every row's positions go through the same loop, also those that all rows of a tile see

    def tile(self, num_heads: int, num_kv_heads: int) -> int:
        """Tokens: as many as fill the rows."""
        return self.rows // (num_heads // num_kv_heads)


def prefill_launch(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> PrefillLaunch:
    """`dtype` is q's. What is accumulated must fit into registers, and two tiles of K and V beside q into 227 KB."""
    wide = next_power_of_two(head_dim, 16)
    if dtype == torch.float32:  # no matrix units: small tiles, all in registers
        rows, block_n, num_warps, num_stages = 16, 32, 8, 2
    elif wide <= 128:
        rows, block_n, num_warps, num_stages = 128, 64, 8, 3
    else:
        rows, block_n, num_warps, num_stages = 64, 32, 4 if wide == 256 else 8, 3 if wide == 256 else 2
    return PrefillLaunch(max(rows, next_power_of_two(num_heads // num_kv_heads)), block_n, num_warps, num_stages)


def invariant_launch(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> PrefillLaunch:
    """For prompts and decoding alike. Tiles of 64 rows: a decoding token fills 4 or 8 of them, and no fewer can be
    multiplied at once; two programs share a multiprocessor."""
    launch = prefill_launch(head_dim, num_heads, num_kv_heads, dtype)
    if launch.rows == 128 and num_heads // num_kv_heads <= 64:
        launch = replace(launch, rows=64, num_warps=4)
    return replace(launch, uniform=True)


def prefill(
    q: Tensor,
    pages: Pages,
    runs: Runs,
    plan: PrefillPlan,
    scoring: Scoring,
    *,
    out: Tensor | None = None,
    launch: PrefillLaunch | None = None,
) -> Tensor:
    """q [T, heads, head_dim] -> out, of the same shape and type, for tokens of the sequences that `plan` serves; other
    tokens are left as they are. A sequence's queries stand at the last positions of its context."""
    _, num_heads, head_dim = q.shape
    group = num_heads // pages.num_kv_heads
    assert q.stride(2) == 1 and group * pages.num_kv_heads == num_heads and head_dim == pages.head_dim
    launch = launch or prefill_launch(head_dim, num_heads, pages.num_kv_heads, q.dtype)
    assert plan.tile == launch.rows // group, f"planned for tiles of {plan.tile} tokens, not {launch.rows // group}"
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    factor, cap = scoring.factors(pages.k_fp8_scale)
    scales = pages.k_scales
    codes = pages.k.dtype.itemsize == 1
    k, v = as_words(pages.k), as_words(pages.v)
    _prefill[(pages.num_kv_heads, plan.max_tiles)](
        q,
        k,
        v,
        pages.k_scales,
        pages.v_scales,
        out,
        plan.starts,
        runs.seq_starts,
        runs.context_lens,
        runs.block_tables,
        scoring.slopes,
        scoring.sinks,
        scoring.biases,
        runs.num_seqs,
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
        GROUP=group,
        TILE=plan.tile,
        ROWS=launch.rows,
        WINDOW=scoring.window,
        REACH=scoring.reach,
        CAPPED=scoring.soft_cap > 0.0,
        CODES=codes,
        OFFSET_TYPE=offset_type(k),
        UNIFORM=launch.uniform,
        BLOCK_SIZE=pages.block_size,
        BLOCK_N=launch.block_n,
        D=head_dim,
        D_PAD=next_power_of_two(head_dim, 32 if codes else 16),
        DOT_TYPE=dot_type(q, pages.k.dtype),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.max_registers,
    )
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill(
    q,
    k,
    v,
    k_scales,
    v_scales,
    out,
    starts,
    seq_starts,
    context_lens,
    block_tables,
    slopes,
    sinks,
    biases,
    num_seqs,
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
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    CAPPED: tl.constexpr,
    CODES: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    kv = tl.program_id(0)
    piece = tl.program_id(1)
    if piece >= tl.load(starts + num_seqs):
        return
    seq = find_sequence(starts, num_seqs, piece)
    tile = tl.load(starts + seq + 1) - 1 - piece  # the last tile, which sees the most, first
    token = tl.load(seq_starts + seq)
    num_queries = tl.load(seq_starts + seq + 1) - token
    context_len = tl.load(context_lens + seq)

    row = tl.arange(0, ROWS)
    columns = tl.arange(0, D_PAD)
    query = tile * TILE + row // GROUP
    head = kv * GROUP + row % GROUP
    exists = (row < TILE * GROUP) & (query < num_queries)
    present = exists[:, None] & (columns < D)[None, :]
    q_at = (token + query).to(tl.int64) * q_token + head * q_head
    rows = tl.load(q + q_at[:, None] + columns[None, :], mask=present, other=0.0).to(DOT_TYPE)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=exists, other=0.0) * EXP2_SCALE
    bias = None
    if biases is not None:
        bias = biases + head * (2 * REACH + 1) + REACH

    # Positions first .. last are the queries'. All of them see full_begin .. full_end.
    first = context_len - num_queries + tile * TILE
    last = tl.minimum(first + TILE, context_len) - 1
    begin = first * 0
    full_begin = begin
    full_end = (first + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, full_end)
    if UNIFORM:
        full_end = begin

    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    m = tl.full([ROWS], FINITE_MIN, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for phase in tl.static_range(2 if UNIFORM else (0 if WINDOW > 0 else 1), 3):
        acc, m, l = attend(
            acc,
            m,
            l,
            rows,
            begin if phase == 0 else (full_begin if phase == 1 else full_end),
            full_begin if phase == 0 else (full_end if phase == 1 else last + 1),
            block_tables + seq.to(tl.int64) * table_seq,
            k + kv * kv_head,
            v + kv * kv_head,
            kv_block,
            kv_slot,
            k_scales + kv * scale_head if k_scales is not None else None,
            v_scales + kv * scale_head if v_scales is not None else None,
            scale_block,
            scale_slot,
            first + row // GROUP,
            slope,
            bias,
            None,
            0,
            None,
            factor,
            cap,
            phase != 1,
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
    if sinks is not None:
        acc, m, l = add_sink(acc, m, l, tl.load(sinks + head, mask=exists, other=0.0) * EXP2_SCALE)
    result = acc * (v_fp8_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    out_at = (token + query).to(tl.int64) * out_token + head * out_head
    tl.store(out + out_at[:, None] + columns[None, :], result, mask=present)
