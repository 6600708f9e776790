# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Recurrences with a matrix as their state, S [key_dim, value_dim] for each head: the gated delta rule, Kimi delta
attention, lightning attention and Mamba 2.

All are S = decay * S; S = S + k u^T; output = q . S, where u is v, or in the delta rule beta * (v - k . S). In Mamba 2,
k is b, q is c, v is delta * x, and skip * x is added to the output. Here tokens are taken one after the other, in fp32,
by one program for some columns of a head's state: the same bits in steps of any size. For prompts tiles.py is
faster."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.states.functions import softplus
from quire.ops.gpu.states.segments import DeviceSegments

TILE_NUMBERS = 4096  # of a state that one warp takes: 128 a thread
MAX_COLUMNS = 32


class Decays(IntEnum):
    """How a kernel finds the decay of a token and head."""

    TOKEN = 0  # its logarithm [T, heads]
    ROW = 1  # of every row of a state, its logarithm [T, heads * key_dim]
    HEAD = 2  # [heads], the same for all tokens
    MAMBA2 = 3  # exp(a * delta), with delta = softplus(dt + dt_bias), clamped; dt [T, heads]


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """The numbers that decide how much of a state a token keeps, and how much it adds."""

    kind: Decays
    decay: Tensor  # as `kind` says
    beta: Tensor | None = None  # [T, heads]: the delta rule
    dt_bias: Tensor | None = None  # [heads], in Mamba 2; so are a and skip
    a: Tensor | None = None
    skip: Tensor | None = None
    min_delta: float = 0.0
    max_delta: float = float("inf")

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of a kernel."""
        nothing = self.decay
        beta = nothing if self.beta is None else self.beta
        vectors = [nothing if vector is None else vector for vector in (self.dt_bias, self.a, self.skip)]
        decay_stride = 0 if self.kind == Decays.HEAD else self.decay.stride(0)
        return self.decay, decay_stride, beta, beta.stride(0), *vectors, self.min_delta, self.max_delta


def attend_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    slots: Tensor,
    segments: DeviceSegments,
    tiled: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """q and k [T, key_heads * key_dim], v [T, heads * value_dim], slots [slots, heads, key_dim, value_dim] -> [T, heads
    * value_dim] in v's dtype. Rows may be strided. `tiled`: as in `OpSet.delta_rule`. With `out`: the rows of chains
    without tiles are written there, and nothing else is done."""
    _, heads, key_dim, value_dim = slots.shape
    check(q, k, v, gates, slots)
    skips_tiles, out = out is not None, new_output(v, segments) if out is None else out
    rows = triton.next_power_of_2(key_dim)
    columns = max(min(triton.next_power_of_2(value_dim), TILE_NUMBERS // rows, MAX_COLUMNS), 1)
    if len(v):
        _tokens_kernel[(segments.num_chains, heads, triton.cdiv(value_dim, columns))](
            q,
            k,
            v,
            q.stride(0),
            k.stride(0),
            v.stride(0),
            *gates.arguments(),
            slots,
            out,
            segments.table,
            segments.chain_starts,
            segments.has_tiles,
            HEADS=heads,
            KEY_HEADS=q.shape[1] // key_dim,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            TILED=tiled,
            KIND=int(gates.kind),
            HAS_BETA=gates.beta is not None,
            SKIPS_TILES=skips_tiles,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=1,
        )
    return out


def new_output(v: Tensor, segments: DeviceSegments) -> Tensor:
    """Like v. Padding tokens of a step with prompts are in no segment: their outputs are zeros."""
    make = torch.empty if segments.single else torch.zeros
    return make(v.shape, dtype=v.dtype, device=v.device)


def check(q: Tensor, k: Tensor, v: Tensor, gates: Gates, slots: Tensor) -> None:
    _, heads, key_dim, value_dim = slots.shape
    assert q.shape == k.shape and q.shape[1] % key_dim == 0 and heads % (q.shape[1] // key_dim) == 0, f"q {q.shape}"
    assert v.shape[1] == heads * value_dim and slots.is_contiguous(), f"v {v.shape} in {slots.shape}"
    per_head = {Decays.ROW: key_dim}.get(gates.kind, 1)
    assert gates.decay.shape[-1] == heads * per_head, f"decay {gates.decay.shape}"
    assert all(x.stride(-1) == 1 for x in (q, k, v, gates.decay)), "columns lie side by side"
    assert gates.beta is None or (gates.beta.shape[1] == heads and gates.beta.stride(1) == 1)


@triton.jit
def key_head_of(head, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, TILED: tl.constexpr):
    return head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)


@triton.jit
def token_gates(
    decay, decay_stride, beta, beta_stride, dt_bias, a, min_delta, max_delta, token, head, inside,
    KIND: tl.constexpr, HAS_BETA: tl.constexpr,
):  # fmt: skip
    """-> the logarithm of the decay of tokens, and what their values are multiplied by: beta, or delta in Mamba 2."""
    if KIND == 2:
        log = tl.log(tl.load(decay + head))
    else:
        log = tl.load(decay + token * decay_stride + head, mask=inside, other=0.0).to(tl.float32)
    factor = tl.where(inside, 1.0, 0.0)
    if KIND == 3:
        delta = softplus(log + tl.load(dt_bias + head))
        factor = tl.minimum(tl.maximum(delta, min_delta), max_delta)
        log = tl.load(a + head) * factor
    if HAS_BETA:
        factor = tl.load(beta + token * beta_stride + head, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, log, 0.0), factor


@triton.jit
def _tokens_kernel(
    q, k, v, q_stride, k_stride, v_stride, decay, decay_stride, beta, beta_stride, dt_bias, a, skip, min_delta,
    max_delta, slots, out, table, chain_starts, has_tiles,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILED: tl.constexpr,
    KIND: tl.constexpr, HAS_BETA: tl.constexpr, SKIPS_TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chain, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < KEY_DIM, column < VALUE_DIM
    inside = is_row[:, None] & is_column[None]
    key = key_head_of(head, HEADS, KEY_HEADS, TILED) * KEY_DIM + row
    value = head * VALUE_DIM + column
    place = (head * KEY_DIM + row[:, None]) * VALUE_DIM + column[None]
    skipped = 0.0
    if KIND == 3:
        skipped = tl.load(skip + head)
    begin, stop = tl.load(chain_starts + chain), tl.load(chain_starts + chain + 1)
    if SKIPS_TILES:
        begin = tl.where(tl.load(has_tiles + chain) == 0, begin, stop)
    for segment in range(begin, stop):
        first = tl.load(table + 4 * segment).to(tl.int64)
        end = tl.load(table + 4 * segment + 1).to(tl.int64)
        source = tl.load(table + 4 * segment + 2).to(tl.int64)
        target = tl.load(table + 4 * segment + 3).to(tl.int64)
        tl.debug_barrier()  # the segment before may have written what this one reads
        size: tl.constexpr = HEADS * KEY_DIM * VALUE_DIM
        state = tl.load(slots + source * size + place, mask=inside & (source >= 0), other=0.0)
        k_next = tl.load(k + first * k_stride + key, mask=is_row, other=0.0)
        q_next = tl.load(q + first * q_stride + key, mask=is_row, other=0.0)
        v_next = tl.load(v + first * v_stride + value, mask=is_column, other=0.0)
        for token in range(first, end):
            k_token = k_next.to(tl.float32)
            q_token = q_next.to(tl.float32)
            v_token = v_next.to(tl.float32)
            more = token + 1 < end  # the next token is on its way while this one is computed
            k_next = tl.load(k + (token + 1) * k_stride + key, mask=is_row & more, other=0.0)
            q_next = tl.load(q + (token + 1) * q_stride + key, mask=is_row & more, other=0.0)
            v_next = tl.load(v + (token + 1) * v_stride + value, mask=is_column & more, other=0.0)
            if KIND == 1:
                log = tl.load(decay + token * decay_stride + head * KEY_DIM + row, mask=is_row, other=0.0)
                state *= tl.exp(log)[:, None]
                factor = tl.load(beta + token * beta_stride + head).to(tl.float32)
            else:
                log, factor = token_gates(
                    decay, decay_stride, beta, beta_stride, dt_bias, a, min_delta, max_delta, token, head, token >= 0,
                    KIND, HAS_BETA,
                )  # fmt: skip
                state *= tl.exp(log)
            added = v_token
            if HAS_BETA:
                added -= tl.sum(k_token[:, None] * state, axis=0)
            state += k_token[:, None] * (factor * added)[None]
            result = tl.sum(q_token[:, None] * state, axis=0) + skipped * v_token
            tl.store(out + token * (HEADS * VALUE_DIM) + value, result.to(out.dtype.element_ty), mask=is_column)
        tl.store(slots + target * size + place, state, mask=inside & (target >= 0))
