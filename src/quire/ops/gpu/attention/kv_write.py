# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""From the projections to the pages: q and k are normed and turned, k and v stored, in one pass over them.

The twins are `TorchOps.rope` and `TorchCache.write`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import Pages, next_power_of_two
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs
from quire.ops.reference.cache import INT8_MAX, MIN_ABS_MAX  # numbers of the specification

FP8_MAX = tl.constexpr(448.0)  # e4m3 has nothing above; what is greater is stored as this, as everyone does
CODES = tl.constexpr(float(INT8_MAX))
LEAST = tl.constexpr(MIN_ABS_MAX)
ROUNDING = tl.constexpr(1.5 * 2.0**23)  # added and taken away again, it leaves whole numbers, halves to even


def kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    slots: Tensor,
    pages: Pages,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """q [T, heads * head_dim], k and v [T, kv_heads * head_dim], angles [T, rotary_dim] fp32 (cos, then sin; None:
    nothing turns), slots [T] int32 -> q [T, heads, head_dim], turned, in its own type.

    K, turned, and V go to pages at `slots`. A token whose slot is negative is padding: nothing of it is written. With
    q_norm and k_norm [head_dim], every head is divided by its root mean square and multiplied with them before it
    turns. q, k and v may be columns of one projection."""
    num_kv_heads, head_dim = pages.num_kv_heads, pages.head_dim
    num_tokens, num_heads = q.shape[0], q.shape[1] // head_dim
    assert q.stride(1) == k.stride(1) == v.stride(1) == 1 and q.shape[1] % (num_kv_heads * head_dim) == 0
    assert k.shape == v.shape == (num_tokens, num_kv_heads * head_dim)
    assert angles is None or (angles.stride(1) == 1 and angles.shape[1] % 2 == 0 and angles.shape[1] <= head_dim)
    assert all(norm is None or norm.shape == (head_dim,) for norm in (q_norm, k_norm))
    out = q.new_empty(num_tokens, num_heads, head_dim) if out is None else out
    group = num_heads // num_kv_heads
    scales = pages.k_scales
    _kv_write[(num_tokens, num_kv_heads)](
        q,
        k,
        v,
        angles,
        slots,
        q_norm,
        k_norm,
        eps,
        out,
        pages.k,
        pages.v,
        pages.k_scales,
        pages.v_scales,
        1.0 / pages.k_fp8_scale,
        1.0 / pages.v_fp8_scale,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        angles.stride(0) if angles is not None else 0,
        out.stride(0),
        out.stride(1),
        pages.k.stride(0),
        pages.k.stride(1),
        pages.k.stride(2),
        scales.stride(0) if scales is not None else 0,
        scales.stride(1) if scales is not None else 0,
        scales.stride(2) if scales is not None else 0,
        GROUP=group,
        GROUP_PAD=next_power_of_two(group),
        ROTARY=angles.shape[1] if angles is not None else 0,
        BLOCK_SIZE=pages.block_size,
        D=head_dim,
        D_PAD=next_power_of_two(head_dim),
        FP8=pages.k.dtype == torch.float8_e4m3fn,
        OVERLAP=overlap,
        num_warps=1 if group * head_dim <= 1024 else 4,
        enable_fp_fusion=False,  # rounded where the twin rounds, so that both store the same codes
        **overlap_options(overlap),
    )
    return out


@triton.jit
def cos_and_sin(angles, ROTARY: tl.constexpr, D_PAD: tl.constexpr):
    """Of a token's angles, for every column of a head: [1, D_PAD] each. Past ROTARY, cos is 1 and sin is 0."""
    columns = tl.arange(0, D_PAD)
    cos = tl.full([D_PAD], 1.0, tl.float32)
    sin = tl.zeros([D_PAD], tl.float32)
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        angle = angles + columns % half
        cos = tl.load(angle, mask=columns < ROTARY, other=1.0)
        sin = tl.load(angle + half, mask=columns < ROTARY, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def load_rotated_heads(x, columns, present, cos, sin, norm, eps, ROTARY: tl.constexpr, D: tl.constexpr):
    """A tile of heads [heads, columns] at x, normed and turned, in fp32. Column i turns with column i + ROTARY / 2."""
    own = tl.load(x + columns, mask=present, other=0.0).to(tl.float32)
    factor = tl.full([1, 1], 1.0, tl.float32)
    if norm is not None:
        factor = tl.rsqrt(tl.sum(own * own, axis=1, keep_dims=True) / D + eps)
        own = own * factor * tl.load(norm + columns, mask=columns < D, other=0.0)
    if ROTARY == 0:
        return own
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(columns < half, columns + half, columns - half)
    other = tl.load(x + partner, mask=present & (columns < ROTARY), other=0.0).to(tl.float32)
    if norm is not None:
        other = other * factor * tl.load(norm + partner, mask=columns < ROTARY, other=0.0)
    return own * cos + tl.where(columns < half, -other, other) * sin


@triton.jit
def _codes(x, finite):
    """-> int8 codes, and their unit."""
    most = tl.max(tl.abs(x))
    some = finite & (most >= LEAST)
    factor = tl.where(some, tl.div_rn(CODES, tl.where(some, most, 1.0)), 0.0)
    rounded = (tl.where(finite, x, 0.0) * factor + ROUNDING) - ROUNDING
    unit = tl.where(finite, tl.where(some, tl.div_rn(most, CODES), 0.0), float("nan"))
    return rounded.to(tl.int8), unit


@triton.jit
def store_kv(
    k,  # at the token's head
    v,
    cos,
    sin,
    k_norm,
    eps,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    k_factor,
    v_factor,
    at,  # in the pages, of the head's first column
    scale_at,
    ROTARY: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    FP8: tl.constexpr,
):
    """-> both [D_PAD] as they are stored, and their units (1 where there are none)."""
    columns = tl.arange(0, D_PAD)
    within = columns < D
    key = load_rotated_heads(k, columns[None, :], within[None, :], cos, sin, k_norm, eps, ROTARY, D)
    key = tl.reshape(key, [D_PAD])
    value = tl.load(v + columns, mask=within, other=0.0).to(tl.float32)
    key_scale = 1.0
    value_scale = 1.0
    if k_scales is not None:
        # Where one of the two holds what is no number, both units are NaN, and all who look see it.
        finite = tl.max(tl.where((tl.abs(key) < float("inf")) & (tl.abs(value) < float("inf")), 0, 1)) == 0
        key, key_scale = _codes(key, finite)
        value, value_scale = _codes(value, finite)
        tl.store(k_scales + scale_at, key_scale)
        tl.store(v_scales + scale_at, value_scale)
    if FP8:
        key = tl.clamp(key * k_factor, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        value = tl.clamp(value * v_factor, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    key = key.to(k_pages.dtype.element_ty)
    value = value.to(v_pages.dtype.element_ty)
    tl.store(k_pages + at + columns, key, mask=within)
    tl.store(v_pages + at + columns, value, mask=within)
    return key, value, key_scale, value_scale


@triton.jit
def _kv_write(
    q,
    k,
    v,
    angles,
    slots,
    q_norm,
    k_norm,
    eps,
    out,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    k_factor,
    v_factor,
    q_token,
    k_token,
    v_token,
    angle_token,
    out_token,
    out_head,
    kv_block,
    kv_slot,
    kv_head,
    scale_block,
    scale_slot,
    scale_head,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token, one KV head and the query heads that share it."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    columns = tl.arange(0, D_PAD)
    cos, sin = cos_and_sin(angles + token * angle_token if ROTARY > 0 else None, ROTARY, D_PAD)
    member = tl.arange(0, GROUP_PAD)
    head = (kv * GROUP + member)[:, None]
    present = (member < GROUP)[:, None] & (columns < D)[None, :]
    heads = q + token * q_token + head * D
    turned = load_rotated_heads(heads, columns[None, :], present, cos, sin, q_norm, eps, ROTARY, D)
    tl.store(out + token * out_token + head * out_head + columns[None, :], turned, mask=present)

    block = (slot // BLOCK_SIZE).to(tl.int64)
    store_kv(
        k + token * k_token + kv * D,
        v + token * v_token + kv * D,
        cos,
        sin,
        k_norm,
        eps,
        k_pages,
        v_pages,
        k_scales,
        v_scales,
        k_factor,
        v_factor,
        block * kv_block + (slot % BLOCK_SIZE) * kv_slot + kv * kv_head,
        block * scale_block + (slot % BLOCK_SIZE) * scale_slot + kv * scale_head,
        ROTARY,
        D,
        D_PAD,
        FP8,
    )
