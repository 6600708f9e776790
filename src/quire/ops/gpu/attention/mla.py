# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Decoding on a latent cache (multi-head latent attention): all heads read the same row a token.

A row is `latent` numbers that serve as key and as value, and the rest, turned by position, that serve as key alone
(DeepSeek: 512 + 64). Work is shared as in attention_decode.py, by tiles of heads instead of KV heads."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.decode import MIN_TILE_ROWS
from quire.ops.gpu.attention.merge import finish, new_partials, zero_padding
from quire.ops.gpu.attention.pages import LOG2E, Runs, dot_type, next_power_of_two, offset_type
from quire.ops.gpu.attention.plan import MAX_ROW_TILES, DecodePlan, load_piece
from quire.ops.gpu.attention.tile import FINITE_MIN


@dataclass(frozen=True, slots=True)
class MLALaunch:
    rows: int  # heads a program takes
    block_n: int  # positions a round
    num_warps: int
    num_stages: int
    per_multiprocessor: int

    def tiles(self, num_rows: int) -> int:
        """Programs that `num_rows` heads of some queries make."""
        return -(-num_rows // self.rows)


def mla_launch(num_rows: int, dtype: torch.dtype) -> MLALaunch:
    if dtype == torch.float32:
        return MLALaunch(16, 16, 4, 2, 1)
    rows = min(64, next_power_of_two(num_rows, MIN_TILE_ROWS))
    return MLALaunch(rows, 32, 8 if rows == 64 else 4, 3, 1 if rows == 64 else 2)


def mla_decode(
    q: Tensor,
    cache: Tensor,
    runs: Runs,
    plan: DecodePlan,
    scale: float,
    *,
    latent: int = 512,
    cache_scale: float = 1.0,
    out: Tensor | None = None,
    launch: MLALaunch | None = None,
) -> Tensor:
    """q [T, heads, latent + turned], cache [blocks, block_size, latent + turned] of one layer (fp8 times `cache_scale`,
    or 16 or 32 bits) -> [T, heads, latent] in q's type. Which tokens are served and which get zeros is as in `decode`.
    """
    num_tokens, num_heads, width = q.shape
    assert q.stride(2) == 1 and cache.stride(2) == 1 and cache.shape[2] == width > latent
    assert latent & (latent - 1) == 0 and plan.window == 0
    launch = launch or mla_launch(plan.max_queries * num_heads, q.dtype)
    out = q.new_empty(num_tokens, num_heads, latent) if out is None else out
    tiles = launch.tiles(plan.max_queries * num_heads)
    assert tiles <= MAX_ROW_TILES
    parts = new_partials(plan, tiles, launch.rows, latent)
    _mla_decode[(plan.workers * tiles,)](
        q,
        cache,
        out,
        parts.sums,
        parts.weights,
        plan.counters,
        plan.pieces,
        plan.ranges,
        runs.seq_starts,
        runs.context_lens,
        runs.block_tables,
        runs.num_seqs,
        num_tokens,
        scale * cache_scale * LOG2E,
        cache_scale,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        cache.stride(0),
        cache.stride(1),
        runs.block_tables.stride(0),
        plan.counters.stride(0),
        HEADS=num_heads,
        TILES=tiles,
        ROWS=launch.rows,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_N=launch.block_n,
        LATENT=latent,
        TURNED=width - latent,
        TURNED_PAD=next_power_of_two(width - latent, 16),
        OFFSET_TYPE=offset_type(cache),
        DOT_TYPE=dot_type(q, cache.dtype),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _mla_decode(
    q,
    cache,
    out,
    partial_acc,
    partial_ml,
    counters,
    pieces,
    ranges,
    seq_starts,
    context_lens,
    block_tables,
    num_seqs,
    num_tokens,
    factor,
    v_fp8_scale,
    q_token,
    q_head,
    out_token,
    out_head,
    cache_block,
    cache_slot,
    table_seq,
    counter_seq,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_PAD: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    lane = tl.arange(0, BLOCK_N)
    latent_columns = tl.arange(0, LATENT)
    turned_columns = tl.arange(0, TURNED_PAD)
    turned_exists = (turned_columns < TURNED)[None, :]
    worker = (
        tl.program_id(0) // TILES
    )  # all heads of a piece are under way at the same time and share what the cache gives
    tile = tl.program_id(0) % TILES
    row = tile * ROWS + tl.arange(0, ROWS)
    for piece in range(tl.load(ranges + 2 * worker), tl.load(ranges + 2 * worker + 1)):
        seq, begin, end, split, num_splits = load_piece(pieces, piece)
        token = tl.load(seq_starts + seq)
        num_queries = tl.load(seq_starts + seq + 1) - token
        context_len = tl.load(context_lens + seq)
        table = block_tables + seq.to(tl.int64) * table_seq

        query = row // HEADS
        exists = query < num_queries
        query_pos = context_len - num_queries + query
        q_at = ((token + query).to(tl.int64) * q_token + row % HEADS * q_head)[:, None]
        q_latent = tl.load(q + q_at + latent_columns[None, :], mask=exists[:, None], other=0.0).to(DOT_TYPE)
        q_turned = tl.load(
            q + q_at + LATENT + turned_columns[None, :], mask=exists[:, None] & turned_exists, other=0.0
        ).to(DOT_TYPE)

        acc = tl.zeros([ROWS, LATENT], tl.float32)
        m = tl.full([ROWS], FINITE_MIN, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        block = tl.load(table + (begin + lane) // BLOCK_SIZE, mask=begin + lane < end, other=0)
        for start in range(begin, end, BLOCK_N):
            pos = start + lane
            inside = pos < end
            at = (block.to(OFFSET_TYPE) * cache_block + (pos % BLOCK_SIZE) * cache_slot)[:, None]
            known = tl.load(cache + at + latent_columns[None, :], mask=inside[:, None], other=0.0).to(DOT_TYPE)
            turned = tl.load(
                cache + at + LATENT + turned_columns[None, :], mask=inside[:, None] & turned_exists, other=0.0
            ).to(DOT_TYPE)
            scores = tl.dot(q_turned, tl.trans(turned), input_precision="ieee")
            scores = tl.dot(q_latent, tl.trans(known), scores, input_precision="ieee")  # [ROWS, BLOCK_N]
            seen = inside[None, :] & (pos[None, :] <= query_pos[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1) * factor)
            weights = tl.exp2(scores * factor - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            m = m_new
            l = l * alpha + tl.sum(weights, 1)
            acc = tl.dot(weights.to(DOT_TYPE), known, acc * alpha[:, None], input_precision="ieee")
            block = tl.load(table + (pos + BLOCK_N) // BLOCK_SIZE, mask=pos + BLOCK_N < end, other=0)

        finish(
            acc,
            m,
            l,
            exists,
            (token + query).to(tl.int64) * out_token + row % HEADS * out_head,
            out,
            None,
            partial_acc,
            partial_ml,
            counters + seq * counter_seq + tile,
            worker,
            tile,
            split,
            num_splits,
            v_fp8_scale,
            TILES,
            ROWS,
            LATENT,
            LATENT,
        )
    first_padding = tl.load(seq_starts + num_seqs)
    zero_padding(out, first_padding, num_tokens, out_token, out_head, HEADS, LATENT, LATENT)
