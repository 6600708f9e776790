# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The recurrences of linear_attention.py for prompts: tiles of 64 tokens at once, by tensor cores.

With decays d, let c_i be the product of d up to token i of a tile. Then a token's output is c_i q_i . S + the sum over
j <= i of (c_i / c_j) (q_i . k_j) u_j, and the state after the tile is c S + the sum over j of (c / c_j) k_j u_j^T. In
the delta rule, u_i = beta_i (v_i - c_i k_i . S - the sum over j < i of (c_i / c_j) (k_i . k_j) u_j): a triangular
system, whose inverse does not depend on S. One kernel computes the inverses of all tiles at once, by forward
substitution, which is exact where keys repeat; a second one goes through the tiles of each head in order.

Tiles begin at multiples of 64 tokens of the step, wherever segments do: of a triangular matrix, a block on the diagonal
has the block of the inverse as its inverse. Sums depend on where a segment begins, so `batch_invariant` does without
this file. Keys and queries go into tensor cores as they are, in 16 bits; a state, and what is added to it, as the sum
of two such numbers, so that no error stays in a state that its keys did not bring along. Sums are fp32."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.states.linear_attention import Decays, Gates, check, key_head_of, new_output, token_gates
from quire.ops.gpu.states.segments import TILE, DeviceSegments

MAX_KEY_BYTES = 512  # of a token: tiles of keys and of queries fit into shared memory
VALUE_COLUMNS = 32  # of a state, a program
MIN_DOT = 16
FAR = tl.constexpr(1e18)


def takes_tiles(q: Tensor, gates: Gates, key_dim: int, segments: DeviceSegments) -> bool:
    """Rows with decays of their own (Kimi) have no quotients that stay in range."""
    return segments.long and gates.kind != Decays.ROW and key_dim * q.element_size() <= MAX_KEY_BYTES


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, slots: Tensor, segments: DeviceSegments, tiled: bool = False
) -> Tensor:
    """As `attend_tokens`."""
    (T, _), (_, heads, key_dim, value_dim) = v.shape, slots.shape
    check(q, k, v, gates, slots)
    out = new_output(v, segments)
    assert q.dtype == k.dtype, f"q in {q.dtype}, k in {k.dtype}"
    rows = max(triton.next_power_of_2(key_dim), MIN_DOT)
    shape = {"HEADS": heads, "KEY_HEADS": q.shape[1] // key_dim, "KEY_DIM": key_dim, "TILED": tiled}
    options = {**shape, "KIND": int(gates.kind), "TILE": TILE, "ROWS": rows}
    inverses = out
    if gates.beta is not None:
        inverses = torch.empty(triton.cdiv(T, TILE), heads, TILE, TILE, dtype=torch.float32, device=v.device)
        decay, decay_stride, beta, beta_stride = gates.arguments()[:4]
        _inverse_kernel[inverses.shape[:2]](
            k, k.stride(0), decay, decay_stride, beta, beta_stride, segments.before, inverses, T, **options, num_warps=4
        )
    columns = max(min(triton.next_power_of_2(value_dim), VALUE_COLUMNS), MIN_DOT)
    _tiles_kernel[(segments.num_chains, heads, triton.cdiv(value_dim, columns))](
        q,
        k,
        v,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        *gates.arguments(),
        inverses,
        slots,
        out,
        segments.table,
        segments.chain_starts,
        VALUE_DIM=value_dim,
        HAS_BETA=gates.beta is not None,
        COLUMNS=columns,
        **options,
        num_warps=4 if rows <= 128 else 8,
        num_stages=1,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _inverse_kernel(
    k, k_stride, decay, decay_stride, beta, beta_stride, before, inverses, num_tokens,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, TILED: tl.constexpr, KIND: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The inverse of 1 + the strict lower triangle of beta_i (c_i / c_j) (k_i . k_j), for a tile and a head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    index, row = tl.arange(0, TILE), tl.arange(0, ROWS)
    token = (tile * TILE + index).to(tl.int64)
    inside = token < num_tokens
    key = key_head_of(head, HEADS, KEY_HEADS, TILED) * KEY_DIM + row
    mask = inside[:, None] & (row < KEY_DIM)[None]
    keys = tl.load(k + token[:, None] * k_stride + key[None], mask=mask, other=0.0)
    log, factor = token_gates(
        decay, decay_stride, beta, beta_stride, beta, beta, 0.0, 0.0, token, head, inside, KIND, True
    )
    logs = tl.cumsum(tl.where(tl.abs(log) < FAR, log, 0.0), axis=0)
    starts = tl.load(before + token, mask=inside, other=-1) != token - 1
    run = tl.cumsum(starts.to(tl.int32), axis=0)  # tokens of another run may not be numbers
    lower = (index[:, None] > index[None]) & (run[:, None] == run[None])
    shares = tl.exp(tl.where(lower, logs[:, None] - logs[None], float("-inf")))
    products = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    matrix = tl.where(lower, factor[:, None] * shares * products, 0.0)
    matrix = tl.where(tl.abs(matrix) < FAR, matrix, 0.0)  # no other run sees what is no number
    inverse = tl.where(index[:, None] == index[None], 1.0, 0.0)
    for i in range(1, TILE):
        weights = tl.sum(tl.where(index[:, None] == i, matrix, 0.0), axis=0)
        line = tl.sum(weights[:, None] * inverse, axis=0)
        inverse = tl.where(index[:, None] == i, inverse - line[None], inverse)
    place = (tile * HEADS + head).to(tl.int64) * TILE * TILE
    tl.store(inverses + place + index[:, None] * TILE + index[None], inverse)


@triton.jit
def _tiles_kernel(
    q, k, v, q_stride, k_stride, v_stride, decay, decay_stride, beta, beta_stride, dt_bias, a, skip, min_delta,
    max_delta, inverses, slots, out, table, chain_starts,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    KIND: tl.constexpr, HAS_BETA: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chain, head = tl.program_id(0), tl.program_id(1)
    index, row = tl.arange(0, TILE), tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < KEY_DIM, column < VALUE_DIM
    key = key_head_of(head, HEADS, KEY_HEADS, TILED) * KEY_DIM + row
    value = head * VALUE_DIM + column
    place = (head * KEY_DIM + row[:, None]) * VALUE_DIM + column[None]
    in_state = is_row[:, None] & is_column[None]
    skipped = 0.0
    if KIND == 3:
        skipped = tl.load(skip + head)
    for segment in range(tl.load(chain_starts + chain), tl.load(chain_starts + chain + 1)):
        first = tl.load(table + 4 * segment)
        end = tl.load(table + 4 * segment + 1)
        source = tl.load(table + 4 * segment + 2).to(tl.int64)
        target = tl.load(table + 4 * segment + 3).to(tl.int64)
        tl.debug_barrier()  # the segment before may have written what this one reads
        size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
        state = tl.load(slots + source * size + place, mask=in_state & (source >= 0), other=0.0)
        for tile in range(first // TILE, tl.cdiv(end, TILE)):
            token = (tile * TILE + index).to(tl.int64)
            inside = (token >= first) & (token < end)
            is_key = inside[:, None] & is_row[None]
            keys = tl.load(k + token[:, None] * k_stride + key[None], mask=is_key, other=0.0)
            queries = tl.load(q + token[:, None] * q_stride + key[None], mask=is_key, other=0.0)
            is_value = inside[:, None] & is_column[None]
            values = tl.load(v + token[:, None] * v_stride + value[None], mask=is_value, other=0.0).to(tl.float32)
            log, factor = token_gates(
                decay, decay_stride, beta, beta_stride, dt_bias, a, min_delta, max_delta, token, head, inside, KIND,
                HAS_BETA,
            )  # fmt: skip
            logs = tl.cumsum(log, axis=0)
            total = tl.sum(log, axis=0)
            kept = tl.exp(logs)[:, None]
            if HAS_BETA:
                old = _product(keys, state)
                inverse_at = inverses + (tile * HEADS + head).to(tl.int64) * TILE * TILE
                both = inside[:, None] & inside[None]
                inverse = tl.load(inverse_at + index[:, None] * TILE + index[None], mask=both, other=0.0)
                added = _product_of_floats(inverse, factor[:, None] * (values - kept * old), keys)
            else:
                added = factor[:, None] * values
            past = (index[:, None] >= index[None]) & inside[None]
            shares = tl.exp(tl.where(past, logs[:, None] - logs[None], float("-inf")))
            scores = shares * tl.dot(queries, tl.trans(keys), input_precision="ieee")
            result = kept * _product(queries, state) + skipped * values
            result += _product_of_floats(scores, added, keys)
            outputs = out + token[:, None] * (HEADS * VALUE_DIM) + value[None]
            tl.store(outputs, result.to(out.dtype.element_ty), mask=is_value)
            left = added * tl.exp(total - logs)[:, None]
            state = tl.exp(total) * state + _product(tl.trans(keys), left)
        tl.store(slots + target * size + place, state, mask=in_state & (target >= 0))


@triton.jit
def _product(x, y):
    """x . y, where y is fp32: in 16 bits, as the sum of two numbers."""
    if x.dtype == tl.float32:
        result = tl.dot(x, y, input_precision="ieee")
    else:
        high = y.to(x.dtype)
        low = (y - high.to(tl.float32)).to(x.dtype)
        result = tl.dot(x, low, tl.dot(x, high))
    return result


@triton.jit
def _product_of_floats(x, y, keys):
    """x . y, both fp32: as tf32, unless keys are fp32."""
    PRECISION: tl.constexpr = "ieee" if keys.dtype == tl.float32 else "tf32"
    return tl.dot(x, y, input_precision=PRECISION)
