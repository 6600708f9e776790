# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""What the tiles of a prompt need and no state decides: computed for all tiles at once, before tiles.py goes through
them in order.

With decays d, let c_i be the product of d up to token i of a tile, and e_i that of the tokens behind it. The scores are
(c_i / c_j) (q_i . k_j) for j <= i. In the delta rule, token i adds k_i u_i^T to the state, with u_i = beta_i (v_i - c_i
k_i . S - the sum over j < i of (c_i / c_j) (k_i . k_j) u_j), where S is the state before the tile. Let M be the strict
lower triangle of beta_i (c_i / c_j) (k_i . k_j), and X = (1 + M)^-1 diag(beta). Then all u are X v - (X diag(c) k) . S:
the values minus the corrections . S. A quotient of decays is a power of a difference of logarithms, and never above 1.
The inverse is built from those of blocks on its diagonal, twice as large each time: unlike powers of M, that is exact
where keys repeat.

Where rows of a state decay apart (Kimi delta attention), c_i / c_j is inside the products over rows. Between blocks of
16 tokens it is divided at the beginning b of the later block: (c_i / c_b) (c_b / c_j), of which neither is above 1. In
such a block it is computed for every pair of tokens."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.states.linear_attention import Decays, Gates, key_head_of, token_gates
from quire.ops.gpu.states.segments import TILE, DeviceSegments

BLOCK = 16  # tokens that are compared one by one where rows decay apart
LEAST_LOG = tl.constexpr(-1e4)  # of a decay: differences of sums of them stay numbers
NUM_WARPS = 4  # with 8, Triton may lay a product of 64 rows out as one of 128, and read behind a tile in shared memory
MIN_SIZE = 16  # rows and columns of a product
MIN_DELTA_SIZE = 64  # where a decay is one number: with products of 16 rows an H200 gave wrong sums


@dataclass(frozen=True, slots=True, eq=False)
class TileScores:
    """What tiles compute without a state, for T tokens and all heads. What the kind of decays does not need is
    empty."""

    scores: Tensor  # [T, heads, TILE]: of a token and those of its tile
    values: Tensor  # [T, heads, value_dim]: of the delta rule
    corrections: Tensor  # [T, heads, key_dim]: of the delta rule
    decays: Tensor  # [2, heads, T] fp32: c_i, and e_i times what a value is multiplied by; not of rows that decay apart
    queries: Tensor  # [T, heads, key_dim], with c_i: of rows that decay apart
    keys: Tensor  # [T, heads, key_dim], with e_i
    kept: Tensor  # [tiles, heads, key_dim] fp32: c of a tile


def padded(size: int, gates: Gates) -> int:
    """Rows or columns of a state, as products take them."""
    may_be_small = gates.beta is None or gates.kind == Decays.ROW
    return max(int(triton.next_power_of_2(size)), MIN_SIZE if may_be_small else MIN_DELTA_SIZE)


def tile_scores(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, segments: DeviceSegments, heads: int, key_dim: int, tiled: bool
) -> TileScores:
    """q, k and v as in `attend_tokens`, in 16 bits."""
    T, value_dim = len(v), v.shape[1] // heads
    is_delta, decays_rows = gates.beta is not None, gates.kind == Decays.ROW

    def empty(wanted: bool, *shape: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return torch.empty(shape if wanted else (0,), dtype=dtype, device=q.device)

    found = TileScores(
        empty(True, T, heads, TILE),
        empty(is_delta, T, heads, value_dim),
        empty(is_delta, T, heads, key_dim),
        empty(not decays_rows, 2, heads, T, dtype=torch.float32),
        empty(decays_rows, T, heads, key_dim),
        empty(decays_rows, T, heads, key_dim),
        empty(decays_rows, segments.max_tiles, heads, key_dim, dtype=torch.float32),
    )
    rows, columns = padded(key_dim, gates), padded(value_dim, gates)
    _scores_kernel[(heads, segments.max_tiles)](
        q,
        k,
        v,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *gates.arguments()[:6],
        gates.min_delta,
        gates.max_delta,
        segments.tiles,
        segments.num_tiles,
        found.scores,
        found.values,
        found.corrections,
        found.decays,
        found.queries,
        found.keys,
        found.kept,
        T,
        HEADS=heads,
        KEY_HEADS=q.shape[1] // key_dim,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TILED=tiled,
        KIND=int(gates.kind),
        HAS_BETA=is_delta,
        TILE=TILE,
        BLOCK=BLOCK,
        ROWS=rows,
        COLUMNS=min(columns, 128),
        num_warps=8 if decays_rows else NUM_WARPS,
    )
    return found


@triton.jit(do_not_specialize=["num_tokens"])
def _scores_kernel(
    q, k, v, q_stride, k_stride, v_stride, decay, decay_stride, beta, beta_stride, dt_bias, a, min_delta, max_delta,
    tiles, num_tiles, scores_out, values_out, corrections_out, decays_out, queries_out, keys_out, kept_out, num_tokens,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    KIND: tl.constexpr, HAS_BETA: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tl.program_id(1)
    if tile < tl.load(num_tiles + 1):
        first = tl.load(tiles + 2 * tile)
        end = tl.load(tiles + 2 * tile + 1)
        index, row = tl.arange(0, TILE), tl.arange(0, ROWS)
        token = (first + index).to(tl.int64)
        inside, is_row = token < end, row < KEY_DIM
        mask = inside[:, None] & is_row[None]
        key = key_head_of(head, HEADS, KEY_HEADS, TILED) * KEY_DIM + row
        queries = tl.load(q + token[:, None] * q_stride + key[None], mask=mask, other=0.0)
        keys = tl.load(k + token[:, None] * k_stride + key[None], mask=mask, other=0.0)
        place = (token * HEADS + head)[:, None]  # of a token and head
        below = index[:, None] > index[None]
        if KIND == 1:
            factor = tl.load(beta + token * beta_stride + head, mask=inside, other=0.0).to(tl.float32)
            column = head * KEY_DIM + row
            log = tl.load(decay + token[:, None] * decay_stride + column[None], mask=mask, other=0.0)
            log = tl.maximum(log, LEAST_LOG, propagate_nan=tl.PropagateNan.ALL)
            logs, total = tl.cumsum(log, axis=0), tl.sum(log, axis=0)
            scores, products = _row_products(
                queries, keys, log, logs, k, k_stride, key, decay, decay_stride, column, token, inside, is_row,
                TILE, BLOCK,
            )  # fmt: skip
            matrix = factor[:, None] * products
            seen = (queries.to(tl.float32) * tl.exp(logs)).to(keys.dtype)
            left = (keys.to(tl.float32) * tl.exp(total[None] - logs)).to(keys.dtype)
            tl.store(queries_out + place * KEY_DIM + row[None], seen, mask=mask)
            tl.store(keys_out + place * KEY_DIM + row[None], left, mask=mask)
            tl.store(kept_out + (tile * HEADS + head) * KEY_DIM + row, tl.exp(total), mask=is_row)
            keys = (keys.to(tl.float32) * tl.exp(logs)).to(keys.dtype)
            kept = tl.full([TILE], 1.0, tl.float32)
        else:
            log, factor = token_gates(
                decay, decay_stride, beta, beta_stride, dt_bias, a, min_delta, max_delta, token, head, inside, KIND,
                HAS_BETA,
            )  # fmt: skip
            log = tl.maximum(log, LEAST_LOG, propagate_nan=tl.PropagateNan.ALL)
            logs, total = tl.cumsum(log, axis=0), tl.sum(log, axis=0)
            kept, left = tl.exp(logs), tl.exp(total - logs)
            at_or_below = index[:, None] >= index[None]
            shares = tl.exp(tl.where(at_or_below, logs[:, None] - logs[None], float("-inf")))
            scores = shares * tl.dot(queries, tl.trans(keys))
            if HAS_BETA:
                matrix = factor[:, None] * shares * tl.dot(keys, tl.trans(keys))
            else:
                scores *= factor[None]
                left *= factor
            tl.store(decays_out + head * num_tokens + token, kept, mask=inside)
            tl.store(decays_out + (HEADS + head) * num_tokens + token, left, mask=inside)
        in_tile = inside[:, None] & (index[None] >= 0)
        tl.store(scores_out + place * TILE + index[None], scores.to(scores_out.dtype.element_ty), mask=in_tile)
        if HAS_BETA:
            inverse = _inverse(tl.where(below, matrix, 0.0), index) * factor[None]
            corrections = tl.dot((inverse * kept[None]).to(keys.dtype), keys).to(keys.dtype)
            tl.store(corrections_out + place * KEY_DIM + row[None], corrections, mask=mask)
            weights = inverse.to(keys.dtype)
            for begin in tl.static_range(0, VALUE_DIM, COLUMNS):
                column = begin + tl.arange(0, COLUMNS)
                is_value = inside[:, None] & (column < VALUE_DIM)[None]
                source = v + token[:, None] * v_stride + (head * VALUE_DIM + column)[None]
                values = tl.dot(weights, tl.load(source, mask=is_value, other=0.0))
                tl.store(values_out + place * VALUE_DIM + column[None], values.to(keys.dtype), mask=is_value)


@triton.jit
def _inverse(matrix, index):
    """(1 + matrix)^-1 of a strict lower triangle, from the inverses of blocks on the diagonal. If A and B are those of
    two neighbours, and C is the block below A and beside B, the block of the inverse in the place of C is -B C A."""
    inverse = tl.where(index[:, None] == index[None], 1.0, 0.0)
    for level in range(6):  # blocks of 1, 2, 4, ... 32
        row, column = index[:, None] >> level, index[None] >> level
        beside = (row != column) & ((row >> 1) == (column >> 1))
        inner = tl.dot(tl.where(beside, matrix, 0.0), inverse, input_precision="tf32")
        inverse -= tl.dot(inverse, inner, input_precision="tf32")
    return inverse


@triton.jit
def _row_products(
    queries, keys, log, logs, k, k_stride, key, decay, decay_stride, column, token, inside, is_row,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """-> (q_i (c_i / c_j) . k_j) for j <= i, and (k_i (c_i / c_j) . k_j) for j < i, where c has rows."""
    index = tl.arange(0, TILE)
    own_q, own_k = queries.to(tl.float32), keys.to(tl.float32)
    scores = tl.zeros([TILE, TILE], tl.float32)
    products = tl.zeros([TILE, TILE], tl.float32)
    for block in range(1, TILE // BLOCK):
        border = tl.sum(tl.where(index[:, None] < block * BLOCK, log, 0.0), axis=0)[None]
        later = tl.exp(tl.where(index[:, None] // BLOCK == block, logs - border, float("-inf")))
        earlier = tl.exp(tl.where(index[:, None] < block * BLOCK, border - logs, float("-inf")))
        others = tl.trans((own_k * earlier).to(keys.dtype))
        scores = tl.dot((own_q * later).to(keys.dtype), others, scores)
        products = tl.dot((own_k * later).to(keys.dtype), others, products)
    between = tl.zeros_like(log)  # the sum of logs behind token i - back, up to token i
    for back in range(BLOCK):
        near = ((index % BLOCK) >= back) & inside
        mask = near[:, None] & is_row[None]
        if back > 0:
            step = tl.load(decay + (token - back + 1)[:, None] * decay_stride + column[None], mask=mask, other=0.0)
            between += tl.maximum(step, LEAST_LOG, propagate_nan=tl.PropagateNan.ALL)
        other = tl.load(k + (token - back)[:, None] * k_stride + key[None], mask=mask, other=0.0).to(tl.float32)
        other *= tl.exp(between)
        here = near[:, None] & (index[None] == index[:, None] - back)
        scores += tl.where(here, tl.sum(own_q * other, axis=1)[:, None], 0.0)
        products += tl.where(here, tl.sum(own_k * other, axis=1)[:, None], 0.0)
    return scores, products
