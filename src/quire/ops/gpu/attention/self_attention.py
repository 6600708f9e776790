# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
# ruff: noqa: E741 (l is the running sum of an online softmax)
"""Self-attention inside a step: K and V as the projection leaves them, no pages.

A program takes a tile of neighbouring tokens of one sequence, and one query head."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import LOG2E, Runs, dot_type, head_args, next_power_of_two
from quire.ops.gpu.attention.plan import find_sequence, plan_prefill
from quire.ops.gpu.attention.tile import EXP2_SCALE, FINITE_MIN


class DistanceArgs(NamedTuple):
    """What scores read of the distance from a query to a key (DeBERTa): `OpSet.disentangled_attention`."""

    by_query: Tensor  # [T, heads * n]
    by_key: Tensor  # [T, heads * n]
    query_token: int
    key_token: int
    row_count: int  # n
    rows: Tensor  # [2m + 1] int32
    most: int  # m


def distance_args(by_query: Tensor, by_key: Tensor, num_heads: int, rows: Tensor) -> DistanceArgs:
    assert by_query.shape == by_key.shape and by_query.stride(1) == by_key.stride(1) == 1
    strides = by_query.stride(0), by_key.stride(0)
    return DistanceArgs(by_query, by_key, *strides, by_query.shape[1] // num_heads, rows, len(rows) // 2)


def self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Runs,
    scale: float,
    causal: bool,
    window: int,
    biases: Tensor | None = None,
    distances: DistanceArgs | None = None,
) -> Tensor:
    """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], of any strides but the last; biases as in Scoring ->
    like q."""
    num_tokens, num_heads, head_dim = q.shape
    assert k.shape == v.shape and q.stride(2) == k.stride(2) == v.stride(2) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wide = next_power_of_two(head_dim, 16)
    tile, block_n = (16, 32) if q.dtype == torch.float32 or wide > 128 else (64, 64)
    plan = plan_prefill(runs, num_tokens, tile)
    _attend[(num_heads, plan.max_tiles)](
        head_args(q),
        head_args(k),
        head_args(v),
        head_args(out),
        plan.starts,
        runs.seq_starts,
        biases,
        distances,
        runs.num_seqs,
        scale * LOG2E,
        GROUP=num_heads // k.shape[1],
        CAUSAL=causal,
        WINDOW=window,
        REACH=0 if biases is None else biases.shape[1] // 2,
        TILE=tile,
        BLOCK_N=block_n,
        D=head_dim,
        D_PAD=wide,
        DOT_TYPE=dot_type(q, k.dtype),
        num_warps=4,
        num_stages=2,
    )
    return out


@triton.jit(do_not_specialize=["num_seqs"])
def _attend(
    q,  # HeadArgs
    k,
    v,
    out,
    starts,  # [S + 1] the first tile of each sequence
    seq_starts,
    biases,
    distances,  # DistanceArgs, or None
    num_seqs,
    qk_scale,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    REACH: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DOT_TYPE: tl.constexpr,
):
    head = tl.program_id(0)
    piece = tl.program_id(1)
    if piece >= tl.load(starts + num_seqs):
        return
    seq = find_sequence(starts, num_seqs, piece)
    first = (piece - tl.load(starts + seq)) * TILE
    token = tl.load(seq_starts + seq).to(tl.int64)
    length = tl.load(seq_starts + seq + 1) - token.to(tl.int32)

    query = first + tl.arange(0, TILE)
    columns = tl.arange(0, D_PAD)
    present = (query < length)[:, None] & (columns < D)[None, :]
    q_offset = (token + query)[:, None] * q.token + head * q.head
    queries = tl.load(q.ptr + q_offset + columns[None, :], mask=present, other=0.0).to(DOT_TYPE)
    k_rows = k.ptr + token * k.token + head // GROUP * k.head
    v_rows = v.ptr + token * v.token + head // GROUP * v.head

    begin = first * 0
    end = length
    if CAUSAL:
        end = tl.minimum(end, first + TILE)
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(end, first + TILE + WINDOW - 1)
    acc = tl.zeros([TILE, D_PAD], tl.float32)
    m = tl.full([TILE], FINITE_MIN, tl.float32)
    l = tl.zeros([TILE], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < length
        seen = inside[None, :] & (query < length)[:, None]
        distance = query[:, None] - key[None, :]
        if CAUSAL:
            seen = seen & (distance >= 0)
        if WINDOW > 0:
            seen = seen & (distance < WINDOW) & (distance > -WINDOW)
        there = inside[:, None] & (columns < D)[None, :]
        key_at = key.to(tl.int64)[:, None]
        keys = tl.load(k_rows + key_at * k.token + columns[None, :], mask=there, other=0.0).to(DOT_TYPE)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        if distances is not None:
            row = tl.load(distances.rows + distances.most + distance, mask=seen, other=0) + head * distances.row_count
            of_query = distances.by_query + (token + query)[:, None] * distances.query_token + row
            of_key = distances.by_key + (token + key)[None, :] * distances.key_token + row
            scores += tl.load(of_query, mask=seen, other=0.0).to(tl.float32)
            scores += tl.load(of_key, mask=seen, other=0.0).to(tl.float32)
        scores *= qk_scale
        if biases is not None:
            near = tl.minimum(tl.maximum(-distance, -REACH), REACH)
            scores += tl.load(biases + head * (2 * REACH + 1) + REACH + near) * EXP2_SCALE
        scores = tl.where(seen, scores, FINITE_MIN)
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        p = tl.where(seen, tl.exp2(scores - m_new[:, None]), 0.0)
        alpha = tl.exp2(m - m_new)
        values = tl.load(v_rows + key_at * v.token + columns[None, :], mask=there, other=0.0)
        pv = tl.dot(p.to(DOT_TYPE), values.to(DOT_TYPE), input_precision="ieee")
        acc = acc * alpha[:, None] + pv
        l = l * alpha + tl.sum(p, axis=1)
        m = m_new
    result = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_offset = (token + query)[:, None] * out.token + head * out.head
    tl.store(out.ptr + out_offset + columns[None, :], result, mask=present)
