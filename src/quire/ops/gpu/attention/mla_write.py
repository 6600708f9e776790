# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""From the projections to the pages of a latent cache: the rope parts of k and of every q are rotated, in one pass.

Specification: `TorchOps.rope` and `TorchCache.write`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.gpu.attention.kv_write import E4M3_MAX
from quire.ops.gpu.attention.pages import head_args, next_power_of_two
from quire.ops.gpu.overlap import overlap_options, wait_for_inputs


def latent_write(
    latent: Tensor,
    k_rope: Tensor,
    q_rope: Tensor,
    angles: Tensor,
    slots: Tensor,
    page: Tensor,
    q: Tensor,
    *,
    overlap: bool = False,
) -> None:
    """latent [T, n], k_rope [T, r], q_rope [T, heads * r], angles [T, r] fp32 (cos, then sin), slots [T] int32.

    latent and the rotated k_rope go to page [blocks, block_size, n + r] at `slots`; the rotated q_rope goes to the last
    r columns of every head of q [T, heads, n + r]. A token whose slot is negative is padding: nothing of it is
    written."""
    (num_tokens, n), r, num_heads = latent.shape, k_rope.shape[1], q.shape[1]
    assert latent.stride(1) == k_rope.stride(1) == q_rope.stride(1) == angles.stride(1) == 1
    assert page.stride(2) == q.stride(2) == 1 and page.shape[2] == q.shape[2] == n + r
    assert q_rope.shape == (num_tokens, num_heads * r) and angles.shape == (num_tokens, r) and r % 2 == 0
    _latent_write[(num_tokens,)](
        latent,
        k_rope,
        q_rope,
        angles,
        slots,
        page,
        head_args(q),
        latent.stride(0),
        k_rope.stride(0),
        q_rope.stride(0),
        angles.stride(0),
        page.stride(0),
        page.stride(1),
        LATENT=n,
        LATENT_PAD=next_power_of_two(n),
        HALF=r // 2,
        HALF_PAD=next_power_of_two(r // 2),
        HEADS=num_heads,
        HEADS_PAD=next_power_of_two(num_heads),
        BLOCK_SIZE=page.shape[1],
        FP8=page.dtype == torch.float8_e4m3fn,
        OVERLAP=overlap,
        num_warps=4,
        enable_fp_fusion=False,  # rounded where the specification rounds, so that both store the same numbers
        **overlap_options(overlap),
    )


@triton.jit
def _saturate(x, FP8: tl.constexpr):
    if FP8:
        x = tl.clamp(x, -E4M3_MAX, E4M3_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _latent_write(
    latent,
    k_rope,
    q_rope,
    angles,
    slots,
    page,
    q,  # HeadArgs
    latent_token,
    k_rope_token,
    q_rope_token,
    angle_token,
    page_block,
    page_slot,
    LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token."""
    wait_for_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    pair = tl.arange(0, HALF_PAD)
    paired = pair < HALF
    cos = tl.load(angles + token * angle_token + pair, mask=paired, other=1.0)
    sin = tl.load(angles + token * angle_token + HALF + pair, mask=paired, other=0.0)

    column = tl.arange(0, LATENT_PAD)
    row = page + (slot // BLOCK_SIZE).to(tl.int64) * page_block + (slot % BLOCK_SIZE) * page_slot
    x = tl.load(latent + token * latent_token + column, mask=column < LATENT, other=0.0).to(tl.float32)
    tl.store(row + column, _saturate(x, FP8).to(page.dtype.element_ty), mask=column < LATENT)
    own = k_rope + token * k_rope_token + pair
    a = tl.load(own, mask=paired, other=0.0).to(tl.float32)
    b = tl.load(own + HALF, mask=paired, other=0.0).to(tl.float32)
    tl.store(row + LATENT + pair, _saturate(a * cos - b * sin, FP8).to(page.dtype.element_ty), mask=paired)
    tl.store(row + LATENT + HALF + pair, _saturate(b * cos + a * sin, FP8).to(page.dtype.element_ty), mask=paired)

    head = tl.arange(0, HEADS_PAD)
    present = (head < HEADS)[:, None] & paired[None, :]
    heads = q_rope + token * q_rope_token + head[:, None] * (2 * HALF) + pair[None, :]
    a = tl.load(heads, mask=present, other=0.0).to(tl.float32)
    b = tl.load(heads + HALF, mask=present, other=0.0).to(tl.float32)
    to = q.ptr + token * q.token + head[:, None] * q.head + LATENT + pair[None, :]
    tl.store(to, a * cos[None, :] - b * sin[None, :], mask=present)
    tl.store(to + HALF, b * cos[None, :] + a * sin[None, :], mask=present)
