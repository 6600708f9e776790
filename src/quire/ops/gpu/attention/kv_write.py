# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""From the projections to the pages: q and k are normed and rotated, k and v stored, in one pass over them.

Specification: `TorchOps.rope` and `TorchCache.write`."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.pages import Pages, head_args, next_power_of_two
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs
from quire.ops.reference.cache import FP8_MAX, INT8_MAX, MIN_ABS_MAX  # numbers of the specification

E4M3_MAX = tl.constexpr(FP8_MAX)  # greater numbers are stored as this
QMAX = tl.constexpr(float(INT8_MAX))
MIN_MAX = tl.constexpr(MIN_ABS_MAX)
ROUNDING = tl.constexpr(1.5 * 2.0**23)  # added and subtracted, it leaves integers, ties to even


class ProjectionArgs(NamedTuple):
    """q [T, heads * head_dim], k and v [T, kv_heads * head_dim] as the projection leaves them, and what rotates
    them."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_token: int
    k_token: int
    v_token: int
    slots: Tensor  # [T]
    angles: Tensor | None  # [T, rotary_dim] fp32
    angle_token: int
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    eps: float


def projection_args(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    angles: Tensor | None,
    slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> ProjectionArgs:
    assert q.stride(1) == k.stride(1) == v.stride(1) == 1
    strides, angle_stride = (q.stride(0), k.stride(0), v.stride(0)), 0 if angles is None else angles.stride(0)
    return ProjectionArgs(q, k, v, *strides, slots, angles, angle_stride, q_norm, k_norm, eps)


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
    """q [T, heads * head_dim], k and v [T, kv_heads * head_dim], angles [T, rotary_dim] fp32 (cos, then sin; None: no
    rotation), slots [T] int32 -> q [T, heads, head_dim], rotated, in its own type.

    K, rotated, and V go to pages at `slots`. A token whose slot is negative is padding: nothing of it is written. With
    q_norm and k_norm [head_dim], every head is divided by its root mean square and multiplied with them before it is
    rotated. q, k and v may be columns of one projection."""
    num_kv_heads, head_dim = pages.num_kv_heads, pages.head_dim
    num_tokens, num_heads = q.shape[0], q.shape[1] // head_dim
    assert q.shape[1] % (num_kv_heads * head_dim) == 0
    assert k.shape == v.shape == (num_tokens, num_kv_heads * head_dim)
    assert angles is None or (angles.stride(1) == 1 and angles.shape[1] % 2 == 0 and angles.shape[1] <= head_dim)
    assert all(norm is None or norm.shape == (head_dim,) for norm in (q_norm, k_norm))
    out = q.new_empty(num_tokens, num_heads, head_dim) if out is None else out
    group = num_heads // num_kv_heads
    _kv_write[(num_tokens, num_kv_heads)](
        projection_args(q, k, v, angles, slots, q_norm, k_norm, eps),
        pages.store_args(),
        head_args(out),
        GROUP=group,
        GROUP_PAD=next_power_of_two(group),
        ROTARY=angles.shape[1] if angles is not None else 0,
        BLOCK_SIZE=pages.block_size,
        D=head_dim,
        D_PAD=next_power_of_two(head_dim),
        FP8=pages.is_fp8,
        OVERLAP=overlap,
        num_warps=1 if group * head_dim <= 1024 else 4,
        enable_fp_fusion=False,  # rounded where the specification rounds, so that both store the same values
        **overlap_options(overlap),
    )
    return out


@triton.jit
def load_cos_sin(x, token, ROTARY: tl.constexpr, D_PAD: tl.constexpr):
    """Cosines and sines of a token's angles, for every column of a head: [1, D_PAD] each. Past ROTARY, cos is 1 and sin
    is 0.

    x: ProjectionArgs"""
    columns = tl.arange(0, D_PAD)
    cos = tl.full([D_PAD], 1.0, tl.float32)
    sin = tl.zeros([D_PAD], tl.float32)
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        angle = x.angles + token * x.angle_token + columns % half
        cos = tl.load(angle, mask=columns < ROTARY, other=1.0)
        sin = tl.load(angle + half, mask=columns < ROTARY, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def load_rotated_heads(x, columns, present, cos, sin, norm, eps, ROTARY: tl.constexpr, D: tl.constexpr):
    """A tile of heads [heads, columns] at x, normed and rotated, in fp32. Column i rotates with column i + ROTARY /
    2."""
    own = tl.load(x + columns, mask=present, other=0.0).to(tl.float32)
    inverse_rms = tl.full([1, 1], 1.0, tl.float32)
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(own * own, axis=1, keep_dims=True) / D + eps)
        own = own * inverse_rms * tl.load(norm + columns, mask=columns < D, other=0.0)
    if ROTARY == 0:
        return own
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(columns < half, columns + half, columns - half)
    other = tl.load(x + partner, mask=present & (columns < ROTARY), other=0.0).to(tl.float32)
    if norm is not None:
        other = other * inverse_rms * tl.load(norm + partner, mask=columns < ROTARY, other=0.0)
    return own * cos + tl.where(columns < half, -other, other) * sin


@triton.jit
def _quantize_int8(x, finite):
    """-> int8 values, and their scale"""
    abs_max = tl.max(tl.abs(x))
    nonzero = finite & (abs_max >= MIN_MAX)
    inverse = tl.where(nonzero, tl.div_rn(QMAX, tl.where(nonzero, abs_max, 1.0)), 0.0)
    rounded = (tl.where(finite, x, 0.0) * inverse + ROUNDING) - ROUNDING
    scale = tl.where(finite, tl.where(nonzero, tl.div_rn(abs_max, QMAX), 0.0), float("nan"))
    return rounded.to(tl.int8), scale


@triton.jit
def store_kv(
    x,  # ProjectionArgs
    pages,  # StoreArgs
    token,
    head,
    slot,
    cos,
    sin,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    FP8: tl.constexpr,
):
    """Store a token's key and value of one KV head -> both [D_PAD] as they are stored, and their scales (1: none)."""
    columns = tl.arange(0, D_PAD)
    within = columns < D
    k = x.k + token * x.k_token + head * D
    v = x.v + token * x.v_token + head * D
    block = (slot // BLOCK_SIZE).to(tl.int64)
    offset = block * pages.block + (slot % BLOCK_SIZE) * pages.slot + head * pages.head
    scale_offset = block * pages.scale_block + (slot % BLOCK_SIZE) * pages.scale_slot + head * pages.scale_head
    key = load_rotated_heads(k, columns[None, :], within[None, :], cos, sin, x.k_norm, x.eps, ROTARY, D)
    key = tl.reshape(key, [D_PAD])
    value = tl.load(v + columns, mask=within, other=0.0).to(tl.float32)
    k_scale = 1.0
    v_scale = 1.0
    if pages.k_scales is not None:
        # Where one of the two is not finite, both scales are NaN: whatever attends to the token sees it.
        finite = tl.max(tl.where((tl.abs(key) < float("inf")) & (tl.abs(value) < float("inf")), 0, 1)) == 0
        key, k_scale = _quantize_int8(key, finite)
        value, v_scale = _quantize_int8(value, finite)
        tl.store(pages.k_scales + scale_offset, k_scale)
        tl.store(pages.v_scales + scale_offset, v_scale)
    if FP8:
        key = tl.clamp(key * pages.k_inverse_scale, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
        value = tl.clamp(value * pages.v_inverse_scale, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    key = key.to(pages.k.dtype.element_ty)
    value = value.to(pages.v.dtype.element_ty)
    tl.store(pages.k + offset + columns, key, mask=within)
    tl.store(pages.v + offset + columns, value, mask=within)
    return key, value, k_scale, v_scale


@triton.jit
def _kv_write(
    x,  # ProjectionArgs
    pages,  # StoreArgs
    out,  # HeadArgs
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
    kv_head = tl.program_id(1)
    slot = tl.load(x.slots + token)
    if slot < 0:
        return
    columns = tl.arange(0, D_PAD)
    cos, sin = load_cos_sin(x, token, ROTARY, D_PAD)
    member = tl.arange(0, GROUP_PAD)
    head = (kv_head * GROUP + member)[:, None]
    present = (member < GROUP)[:, None] & (columns < D)[None, :]
    heads = x.q + token * x.q_token + head * D
    rotated = load_rotated_heads(heads, columns[None, :], present, cos, sin, x.q_norm, x.eps, ROTARY, D)
    tl.store(out.ptr + token * out.token + head * out.head + columns[None, :], rotated, mask=present)
    store_kv(x, pages, token, kv_head, slot, cos, sin, ROTARY, BLOCK_SIZE, D, D_PAD, FP8)
