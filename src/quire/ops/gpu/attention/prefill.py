# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Attention of prompts and of chunks of prompts, sequences of different lengths in one launch.

A program takes a tile of neighbouring query tokens of one sequence and all the query heads of one KV head, and goes
over the pages they see. Only the tiles that a row's own position or window cuts through are masked. Which tile of keys
comes after which depends on positions alone, so a chunked prompt gives the same bits as a whole one.

Decoding tokens can go through it as well, as tiles with one token in them. Where rows are to be batch invariant all of
them do, in one loop that masks every tile: the same instructions whatever is in the tile beside a row."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import Pages, Runs, Scoring, dot_type, head_args, next_power_of_two, offset_type
from quire.ops.gpu.attention.paths import Paths
from quire.ops.gpu.attention.plan import PrefillPlan, find_sequence, first_seen
from quire.ops.gpu.attention.prefill_wide_config import ROWS, can_prefill_wide
from quire.ops.gpu.attention.tile import EXP2_SCALE, FINITE_MIN, add_sink, attend
from quire.ops.opset import WORD_BITS

PATH_PLACES = tl.constexpr(WORD_BITS)


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    rows: int  # of a tile: its tokens times the query heads of a KV head
    block_n: int  # positions a round
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread: 128 let two programs of 8 warps share a multiprocessor
    uniform: bool = False  # every row's positions go through the same loop, also those that all rows of a tile see

    def tile(self, num_heads: int, num_kv_heads: int) -> int:
        """Tokens: as many as fill the rows."""
        return self.rows // (num_heads // num_kv_heads)


def prefill_launch(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> PrefillLaunch:
    """`dtype` is q's. acc must fit into registers, and q with two tiles of K and V into 227 KB of shared memory."""
    wide = next_power_of_two(head_dim, 16)
    if dtype == torch.float32:  # no tensor cores: small tiles, all in registers
        rows, block_n, num_warps, num_stages = 16, 32, 8, 2
    elif wide <= 128:
        rows, block_n, num_warps, num_stages = 128, 64, 8, 3
    else:
        rows, block_n, num_warps, num_stages = 64, 32, 4 if wide == 256 else 8, 3 if wide == 256 else 2
    return PrefillLaunch(max(rows, next_power_of_two(num_heads // num_kv_heads)), block_n, num_warps, num_stages)


def invariant_launch(head_dim: int, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> PrefillLaunch:
    """For prompts and decoding tokens alike. Tiles have 64 rows, the fewest that can be multiplied at once (a decoding
    token fills 4 or 8 of them), and two programs share a multiprocessor."""
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
    paths: Paths | None = None,
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
    is_default = launch == prefill_launch(head_dim, num_heads, pages.num_kv_heads, q.dtype)
    if is_default and launch.rows == ROWS and paths is None and can_prefill_wide(q, pages, scoring):
        from quire.ops.gpu.attention.prefill_wide import wide_prefill  # in Gluon, which other versions may not have

        return wide_prefill(q, pages, runs, plan, scoring, out)
    args = pages.args()
    _prefill[(pages.num_kv_heads, plan.max_tiles)](
        head_args(q),
        head_args(out),
        args,
        runs.args(),
        plan.starts,
        paths.args() if paths else None,
        scoring.args(pages.k_fp8_scale),
        runs.num_seqs,
        pages.v_fp8_scale,
        GROUP=group,
        TILE=plan.tile,
        ROWS=launch.rows,
        WINDOW=scoring.window,
        REACH=scoring.reach,
        OFFSET_TYPE=offset_type(args.k),
        UNIFORM=launch.uniform,
        BLOCK_SIZE=pages.block_size,
        BLOCK_N=launch.block_n,
        D=head_dim,
        D_PAD=pages.padded_head_dim,
        DOT_TYPE=dot_type(q, pages.k.dtype),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        maxnreg=launch.max_registers,
    )
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def _prefill(
    q,  # HeadArgs
    out,  # HeadArgs
    pages,  # PageArgs
    runs,  # RunArgs
    starts,  # [S + 1] the first tile of each sequence
    paths,  # PathArgs, or None
    score,  # ScoreArgs
    num_seqs,
    v_scale,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    if piece >= tl.load(starts + num_seqs):
        return
    seq = find_sequence(starts, num_seqs, piece)
    tile = tl.load(starts + seq + 1) - 1 - piece  # the last tile, which sees the most, first
    token = tl.load(runs.seq_starts + seq)
    num_queries = tl.load(runs.seq_starts + seq + 1) - token
    context_len = tl.load(runs.context_lens + seq)

    row = tl.arange(0, ROWS)
    columns = tl.arange(0, D_PAD)
    query = tile * TILE + row // GROUP
    head = kv_head * GROUP + row % GROUP
    exists = (row < TILE * GROUP) & (query < num_queries)
    present = exists[:, None] & (columns < D)[None, :]
    q_offset = (token + query).to(tl.int64) * q.token + head * q.head
    queries = tl.load(q.ptr + q_offset[:, None] + columns[None, :], mask=present, other=0.0).to(DOT_TYPE)
    slope = None
    if score.slopes is not None:
        slope = tl.load(score.slopes + head, mask=exists, other=0.0) * EXP2_SCALE
    bias = None
    if score.biases is not None:
        bias = score.biases + head * (2 * REACH + 1) + REACH

    path_begin = 0
    places = None
    if paths is not None:
        path_begin = tl.load(paths.begins + seq)
        places = paths.places + seq * PATH_PLACES

    # Positions first .. last are the queries'. All of them see full_begin .. full_end.
    first = context_len - num_queries + tile * TILE
    last = tl.minimum(first + TILE, context_len) - 1
    begin = first * 0
    full_begin = begin
    full_end = (first + 1) // BLOCK_N * BLOCK_N
    if WINDOW != 0:
        begin = first_seen(first, WINDOW) // BLOCK_N * BLOCK_N
        full_begin = tl.minimum(tl.cdiv(first_seen(last, WINDOW), BLOCK_N) * BLOCK_N, full_end)
    if UNIFORM:
        full_end = begin

    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    m = tl.full([ROWS], FINITE_MIN, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    for phase in tl.static_range(2 if UNIFORM else (0 if WINDOW != 0 else 1), 3):
        acc, m, l = attend(
            acc,
            m,
            l,
            queries,
            begin if phase == 0 else (full_begin if phase == 1 else full_end),
            full_begin if phase == 0 else (full_end if phase == 1 else last + 1),
            first_seen(first, WINDOW),
            runs.block_tables + seq.to(tl.int64) * runs.table_stride,
            pages,
            kv_head,
            first + row // GROUP,
            slope,
            bias,
            None,
            path_begin,
            places,
            score,
            phase != 1,
            WINDOW,
            REACH,
            OFFSET_TYPE,
            BLOCK_SIZE,
            BLOCK_N,
            D,
        )
    if score.sinks is not None:
        acc, m, l = add_sink(acc, m, l, tl.load(score.sinks + head, mask=exists, other=0.0) * EXP2_SCALE)
    result = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    out_offset = (token + query).to(tl.int64) * out.token + head * out.head
    tl.store(out.ptr + out_offset[:, None] + columns[None, :], result, mask=present)
