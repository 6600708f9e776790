# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The recurrences of linear_attention.py for prompts: tiles of 64 tokens at once, by tensor cores.

tile_scores.py computes what needs no state for all tiles at once. Here a program takes some columns of a head's state
through the tiles of a chain in order. With c_i and e_i as there, and u what tokens add, the outputs of a tile are c_i
q_i . S + scores . u, and the state behind it is c S + the sum over i of e_i k_i u_i^T. In the delta rule u is values -
corrections . S.

A state stays in registers, in fp32. Tensor cores multiply 16-bit numbers and add in fp32: a state is rounded where it
is multiplied, never where it is kept. Tiles begin where segments do, so sums depend on where a prompt is cut:
`batch_invariant` does without this file."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.states.linear_attention import Gates, attend_tokens, check, key_head_of, new_output
from quire.ops.gpu.states.segments import TILE, DeviceSegments
from quire.ops.gpu.states.tile_scores import MIN_SIZE, TileScores, padded, tile_scores

MAX_KEY_DIM = 128  # tiles of keys, queries and corrections fit into shared memory twice
COPY = 16  # keys and queries begin at multiples of so many numbers, and have as many
MAX_CHAINS = 8  # of a head, that run at the same time


@dataclass(frozen=True, slots=True)
class TileLaunch:
    columns: int  # of a state, at most, a program
    warps: int  # 4: as many as share a product of 64 rows
    stages: int  # tiles that are in shared memory or on their way


LAUNCH = TileLaunch(columns=32, warps=4, stages=2)


def takes_tiles(q: Tensor, k: Tensor, v: Tensor, key_dim: int, segments: DeviceSegments) -> bool:
    """Tensor cores are for 16 bits: fp32 is for comparisons.

    Tiles of keys and queries must be such that they are copied to shared memory without going through registers. Where
    they go through them, ptxas computes the addresses of the last product wrongly: on an H200, keys of 12 or of 256
    numbers gave sums of a tile's first tokens only, or an illegal access."""
    is_copied = key_dim % COPY == 0 and all(x.stride(0) % COPY == 0 and x.data_ptr() % 16 == 0 for x in (q, k))
    has_16_bits = q.dtype == k.dtype == v.dtype != torch.float32
    return segments.max_tiles > 0 and key_dim <= MAX_KEY_DIM and is_copied and has_16_bits


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, slots: Tensor, segments: DeviceSegments, tiled: bool = False
) -> Tensor:
    """`attend_tokens` in tiles, where `takes_tiles`. Chains without tiles take their tokens one after the other."""
    _, heads, key_dim, _ = slots.shape
    check(q, k, v, gates, slots)
    out = new_output(v, segments)
    if not segments.all_tiles:
        attend_tokens(q, k, v, gates, slots, segments, tiled, out)
    found = tile_scores(q, k, v, gates, segments, heads, key_dim, tiled)
    _scan_tiles(q, k, v, gates, slots, segments, tiled, found, out)
    return out


def _scan_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    slots: Tensor,
    segments: DeviceSegments,
    tiled: bool,
    found: TileScores,
    out: Tensor,
) -> None:
    _, heads, key_dim, value_dim = slots.shape
    key_heads = q.shape[1] // key_dim
    if len(found.keys):
        q, k, key_heads = found.queries.flatten(1), found.keys.flatten(1), heads
    if len(found.values):
        v = found.values.flatten(1)
    columns = max(min(triton.next_power_of_2(value_dim), LAUNCH.columns), MIN_SIZE)
    skip = found.scores if gates.skip is None else gates.skip
    grid = triton.cdiv(value_dim, columns), heads, min(segments.max_tiles, MAX_CHAINS)
    _tiles_kernel[grid](
        q,
        k,
        v,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        skip,
        found.scores,
        found.corrections,
        found.decays,
        found.kept,
        slots,
        out,
        segments.table,
        segments.chain_starts,
        segments.tile_chains,
        segments.num_tiles,
        len(v),
        HEADS=heads,
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TILED=tiled,
        DECAYS_ROWS=len(found.keys) > 0,
        IS_DELTA=gates.beta is not None,
        SKIPS=gates.skip is not None,
        TILE=TILE,
        ROWS=padded(key_dim, gates),
        COLUMNS=columns,
        num_warps=LAUNCH.warps,
        num_stages=LAUNCH.stages,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _tiles_kernel(
    q, k, v, q_stride, k_stride, v_stride, skip, scores, corrections, decays, kept_rows, slots, out, table,
    chain_starts, tile_chains, num_tiles, num_tokens,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    DECAYS_ROWS: tl.constexpr, IS_DELTA: tl.constexpr, SKIPS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    index, row = tl.arange(0, TILE), tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < KEY_DIM, column < VALUE_DIM
    key = key_head_of(head, HEADS, KEY_HEADS, TILED) * KEY_DIM + row
    value = head * VALUE_DIM + column
    place = (head * KEY_DIM + row[:, None]) * VALUE_DIM + column[None]
    in_state = is_row[:, None] & is_column[None]
    size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
    skipped = 0.0
    if SKIPS:
        skipped = tl.load(skip + head)
    for number in range(tl.program_id(2), tl.load(num_tiles), tl.num_programs(2)):
        chain = tl.load(tile_chains + 2 * number)
        tile = tl.load(tile_chains + 2 * number + 1)
        for segment in range(tl.load(chain_starts + chain), tl.load(chain_starts + chain + 1)):
            first = tl.load(table + 4 * segment)
            end = tl.load(table + 4 * segment + 1)
            source = tl.load(table + 4 * segment + 2).to(tl.int64)
            target = tl.load(table + 4 * segment + 3).to(tl.int64)
            tl.debug_barrier()  # the segment before may have written what this one reads
            state = tl.load(slots + source * size + place, mask=in_state & (source >= 0), other=0.0)
            for begin in range(first, end, TILE):
                token = (begin + index).to(tl.int64)
                inside = token < end
                is_key, is_value = inside[:, None] & is_row[None], inside[:, None] & is_column[None]
                at = (token * HEADS + head)[:, None]
                keys = tl.load(k + token[:, None] * k_stride + key[None], mask=is_key, other=0.0)
                queries = tl.load(q + token[:, None] * q_stride + key[None], mask=is_key, other=0.0)
                added = tl.load(v + token[:, None] * v_stride + value[None], mask=is_value, other=0.0).to(tl.float32)
                weights = tl.load(scores + at * TILE + index[None], mask=inside[:, None], other=0.0)
                rounded = state.to(keys.dtype)
                result = tl.dot(queries, rounded)
                if IS_DELTA:
                    back = tl.load(corrections + at * KEY_DIM + row[None], mask=is_key, other=0.0)
                    added -= tl.dot(back, rounded)
                left = added
                if DECAYS_ROWS:
                    state *= tl.load(kept_rows + (tile * HEADS + head) * KEY_DIM + row, mask=is_row, other=0.0)[:, None]
                else:
                    decay = decays + head * num_tokens
                    result *= tl.load(decay + token, mask=inside, other=0.0)[:, None]
                    state *= tl.load(decay + tl.minimum(begin + TILE, end) - 1)
                    behind = tl.load(decay + HEADS * num_tokens + token, mask=inside, other=0.0)
                    left = added * behind[:, None]
                if SKIPS:
                    result += skipped * added
                result = tl.dot(weights, added.to(keys.dtype), result)
                state = tl.dot(tl.trans(keys), left.to(keys.dtype), state)
                outputs = out + token[:, None] * (HEADS * VALUE_DIM) + value[None]
                tl.store(outputs, result.to(out.dtype.element_ty), mask=is_value)
                tile += 1
            tl.store(slots + target * size + place, state, mask=in_state & (target >= 0))
