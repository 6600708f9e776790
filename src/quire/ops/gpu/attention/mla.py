# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Multi-head latent attention (MLA) over a latent cache: all heads read the same row of a token.

A row is `latent` numbers that serve as key and as value, and a rope part that serves as key alone (DeepSeek: 512 + 64).
Work is divided as in decode.py, by tiles of heads instead of KV heads."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.decode import MIN_TILE_ROWS
from quire.ops.gpu.attention.merge import finish_piece, new_partials, zero_padding
from quire.ops.gpu.attention.pages import LOG2E, Runs, dot_type, head_args, next_power_of_two, offset_type
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
        """Programs for `num_rows` rows: the heads of one query, or of several."""
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
    chosen: Tensor | None = None,
    out: Tensor | None = None,
    launch: MLALaunch | None = None,
) -> Tensor:
    """q [T, heads, latent + rope], cache [blocks, block_size, latent + rope] of one layer (fp8 times `cache_scale`, or
    16 or 32 bits) -> [T, heads, latent] in q's type. Which tokens are served and which get zeros is as in `decode`.

    chosen [T, top_k] int32 are the slots that tokens attend to (sparse attention). Each token is a run of its own then,
    and its context is as long as there are slots."""
    num_tokens, num_heads, width = q.shape
    assert q.stride(2) == 1 and cache.stride(2) == 1 and cache.shape[2] == width > latent
    assert latent & (latent - 1) == 0 and plan.window == 0
    assert chosen is None or (plan.max_queries == 1 and chosen.stride(1) == 1)
    launch = launch or mla_launch(plan.max_queries * num_heads, q.dtype)
    out = q.new_empty(num_tokens, num_heads, latent) if out is None else out
    tiles = launch.tiles(plan.max_queries * num_heads)
    assert tiles <= MAX_ROW_TILES
    _mla_decode[(plan.workers * tiles,)](
        head_args(q),
        head_args(out),
        cache,
        cache.stride(0),
        cache.stride(1),
        chosen,
        0 if chosen is None else chosen.stride(0),
        runs.args(),
        plan.args(),
        new_partials(plan, tiles, launch.rows, latent),
        runs.num_seqs,
        num_tokens,
        scale * cache_scale * LOG2E,
        cache_scale,
        HEADS=num_heads,
        TILES=tiles,
        ROWS=launch.rows,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_N=launch.block_n,
        LATENT=latent,
        ROPE=width - latent,
        ROPE_PAD=next_power_of_two(width - latent, 16),
        OFFSET_TYPE=offset_type(cache),
        DOT_TYPE=dot_type(q, cache.dtype),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


@triton.jit
def _load_place(table, pos, end, chosen, BLOCK_SIZE: tl.constexpr):
    """Where positions before `end` are: their blocks, or the slots that were chosen."""
    return tl.load(table + (pos // BLOCK_SIZE if chosen is None else pos), mask=pos < end, other=0)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _mla_decode(
    q,  # HeadArgs
    out,  # HeadArgs
    cache,
    cache_block,
    cache_slot,
    chosen,  # slots of each token's context; or None: the context is all of a sequence
    chosen_token,
    runs,  # RunArgs
    plan,  # DecodePlanArgs
    partials,  # PartialSoftmax
    num_seqs,
    num_tokens,
    qk_scale,
    v_scale,
    HEADS: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    OFFSET_TYPE: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    lane = tl.arange(0, BLOCK_N)
    latent_columns = tl.arange(0, LATENT)
    rope_columns = tl.arange(0, ROPE_PAD)
    rope_exists = (rope_columns < ROPE)[None, :]
    worker = tl.program_id(0) // TILES  # all heads of a piece run at the same time and share what is in the L2 cache
    tile = tl.program_id(0) % TILES
    row = tile * ROWS + tl.arange(0, ROWS)
    for piece in range(tl.load(plan.ranges + 2 * worker), tl.load(plan.ranges + 2 * worker + 1)):
        seq, begin, end, split, num_splits = load_piece(plan.pieces, piece)
        token = tl.load(runs.seq_starts + seq)
        num_queries = tl.load(runs.seq_starts + seq + 1) - token
        context_len = tl.load(runs.context_lens + seq)
        table = runs.block_tables + seq.to(tl.int64) * runs.table_stride
        if chosen is not None:
            table = chosen + token.to(tl.int64) * chosen_token

        query = row // HEADS
        exists = query < num_queries
        query_pos = context_len - num_queries + query
        q_offset = ((token + query).to(tl.int64) * q.token + row % HEADS * q.head)[:, None]
        q_latent = tl.load(q.ptr + q_offset + latent_columns[None, :], mask=exists[:, None], other=0.0).to(DOT_TYPE)
        q_rope = tl.load(
            q.ptr + q_offset + LATENT + rope_columns[None, :], mask=exists[:, None] & rope_exists, other=0.0
        ).to(DOT_TYPE)

        acc = tl.zeros([ROWS, LATENT], tl.float32)
        m = tl.full([ROWS], FINITE_MIN, tl.float32)
        l = tl.zeros([ROWS], tl.float32)
        place = _load_place(table, begin + lane, end, chosen, BLOCK_SIZE)
        for start in range(begin, end, BLOCK_N):
            pos = start + lane
            inside = pos < end
            block = place if chosen is None else place // BLOCK_SIZE
            offset = (pos if chosen is None else place) % BLOCK_SIZE
            row_offset = (block.to(OFFSET_TYPE) * cache_block + offset * cache_slot)[:, None]
            latents = tl.load(cache + row_offset + latent_columns[None, :], mask=inside[:, None], other=0.0).to(
                DOT_TYPE
            )
            k_rope = tl.load(
                cache + row_offset + LATENT + rope_columns[None, :], mask=inside[:, None] & rope_exists, other=0.0
            ).to(DOT_TYPE)
            scores = tl.dot(q_rope, tl.trans(k_rope), input_precision="ieee")
            scores = tl.dot(q_latent, tl.trans(latents), scores, input_precision="ieee")  # [ROWS, BLOCK_N]
            seen = inside[None, :] & (pos[None, :] <= query_pos[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1) * qk_scale)
            p = tl.exp2(scores * qk_scale - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            m = m_new
            l = l * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(DOT_TYPE), latents, acc * alpha[:, None], input_precision="ieee")
            place = _load_place(table, pos + BLOCK_N, end, chosen, BLOCK_SIZE)

        finish_piece(
            acc,
            m,
            l,
            exists,
            (token + query).to(tl.int64) * out.token + row % HEADS * out.head,
            out.ptr,
            None,
            partials,
            plan.counters + seq * plan.counter_stride + tile,
            worker,
            tile,
            split,
            num_splits,
            v_scale,
            TILES,
            LATENT,
        )
    first_padding = tl.load(runs.seq_starts + num_seqs)
    zero_padding(out, first_padding, num_tokens, HEADS, LATENT, LATENT)
