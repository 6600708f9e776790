# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The time mixing of RWKV 7: the state of a head is a matrix, of which a token removes what it holds under one key and
to which it adds its value under another.

Tokens are taken one after the other, in fp32, by one program for some columns of a head's values: the same bits in
steps of any size. The norm of a head and the bonus of a token need no state, and come after it."""

from math import exp

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.states.segments import DeviceSegments
from quire.ops.opset import Wkv7Weights

DECAY = tl.constexpr(-exp(-0.5))
MIN_LENGTH = tl.constexpr(1e-12)  # of a key that is normed
STATE_NUMBERS = 1024  # of one warp


def wkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    weights: Wkv7Weights,
    slots: Tensor,
    segments: DeviceSegments,
) -> Tensor:
    """r, w, k, v and a [T, heads * n], rows may be strided; slots [slots, heads, n, n]; see `OpSet.wkv7`."""
    (T, columns), (_, heads, n, _) = r.shape, slots.shape
    given = r, w, k, v, a
    assert all(x.shape == (T, heads * n) and x.stride(1) == 1 for x in given) and slots.is_contiguous(), f"{r.shape}"
    make = torch.empty if segments.single else torch.zeros  # padding tokens of a step with prompts are in no segment
    mixed = make(T, columns, dtype=torch.float32, device=r.device)
    out = torch.empty(T, columns, dtype=r.dtype, device=r.device)
    if T == 0:
        return out
    strides, rows = [x.stride(0) for x in given], triton.next_power_of_2(n)
    block = min(rows, max(STATE_NUMBERS // rows, 4))
    _mix_kernel[(segments.num_chains, heads, triton.cdiv(n, block))](
        *given,
        *strides,
        weights.remove_scale,
        weights.learn_scale,
        slots,
        mixed,
        segments.table,
        segments.chain_starts,
        HEADS=heads,
        N=n,
        ROWS=rows,
        COLUMNS=block,
        num_warps=1,
    )
    _finish_kernel[(T, heads)](
        mixed,
        r,
        k,
        v,
        a,
        *(x.stride(0) for x in (r, k, v, a)),
        weights.learn_scale,
        weights.bonus,
        weights.norm,
        weights.norm_bias,
        out,
        weights.eps,
        HEADS=heads,
        N=n,
        ROWS=rows,
        num_warps=1,
    )
    return out


@triton.jit
def _mix_kernel(
    r, w, k, v, a, r_stride, w_stride, k_stride, v_stride, a_stride, remove_scale, learn_scale, slots, out, table,
    chain_starts, HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    chain, head = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = row < N, column < N
    inside = is_row[:, None] & is_column[None]
    key = head * N + row
    value = head * N + column
    place = (head * N + row[:, None]) * N + column[None]
    removes = tl.load(remove_scale + key, mask=is_row, other=0.0)
    learns = tl.load(learn_scale + key, mask=is_row, other=0.0)
    for segment in range(tl.load(chain_starts + chain), tl.load(chain_starts + chain + 1)):
        first = tl.load(table + 4 * segment).to(tl.int64)
        end = tl.load(table + 4 * segment + 1).to(tl.int64)
        source = tl.load(table + 4 * segment + 2).to(tl.int64)
        target = tl.load(table + 4 * segment + 3).to(tl.int64)
        tl.debug_barrier()  # the segment before may have written what this one reads
        size: tl.constexpr = HEADS * N * N
        state = tl.load(slots + source * size + place, mask=inside & (source >= 0), other=0.0)
        for token in range(first, end):
            r_token = tl.load(r + token * r_stride + key, mask=is_row, other=0.0).to(tl.float32)
            w_token = tl.load(w + token * w_stride + key, mask=is_row, other=0.0).to(tl.float32)
            k_token = tl.load(k + token * k_stride + key, mask=is_row, other=0.0).to(tl.float32)
            a_token = tl.load(a + token * a_stride + key, mask=is_row, other=0.0).to(tl.float32)
            v_token = tl.load(v + token * v_stride + value, mask=is_column, other=0.0).to(tl.float32)
            recall = k_token * removes
            recall = recall / tl.maximum(tl.sqrt(tl.sum(recall * recall, 0)), MIN_LENGTH)
            learned = k_token * (1.0 + (a_token - 1.0) * learns)
            recalled = tl.sum(recall[:, None] * state, 0)
            state = tl.exp(DECAY * tl.sigmoid(w_token))[:, None] * state + learned[:, None] * v_token[None]
            state -= (recall * a_token)[:, None] * recalled[None]
            tl.store(out + token * (HEADS * N) + value, tl.sum(r_token[:, None] * state, 0), mask=is_column)
        tl.store(slots + target * size + place, state, mask=inside & (target >= 0))


@triton.jit
def _finish_kernel(
    mixed, r, k, v, a, r_stride, k_stride, v_stride, a_stride, learn_scale, bonus, norm, norm_bias, out, eps,
    HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The layer norm of a head, and its bonus: what the token itself has under its receptance, times its value."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, ROWS)
    inside = row < N
    column = head * N + row
    x = tl.load(mixed + token * (HEADS * N) + column, mask=inside, other=0.0)
    centered = tl.where(inside, x - tl.sum(x, 0) / N, 0.0)
    normed = centered / tl.sqrt(tl.sum(centered * centered, 0) / N + eps)
    normed = normed * tl.load(norm + column, mask=inside, other=0.0)
    normed += tl.load(norm_bias + column, mask=inside, other=0.0)
    r_token = tl.load(r + token * r_stride + column, mask=inside, other=0.0).to(tl.float32)
    k_token = tl.load(k + token * k_stride + column, mask=inside, other=0.0).to(tl.float32)
    v_token = tl.load(v + token * v_stride + column, mask=inside, other=0.0).to(tl.float32)
    a_token = tl.load(a + token * a_stride + column, mask=inside, other=0.0).to(tl.float32)
    learned = k_token * (1.0 + (a_token - 1.0) * tl.load(learn_scale + column, mask=inside, other=0.0))
    share = tl.sum(r_token * learned * tl.load(bonus + column, mask=inside, other=0.0), 0)
    result = normed + share * v_token
    tl.store(out + token * (HEADS * N) + column, result.to(out.dtype.element_ty), mask=inside)
