"""Attention of whole prompts through torch's fused kernels, to compare `prefill` with.

It reads K and V as the projection leaves them and knows neither pages nor windows, so it serves prompts that begin at
position 0 and fit into one step."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def dense_prefill(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, backend: SDPBackend | None = None
) -> Tensor:
    """q [T, heads, head_dim], k and v [T, kv_heads, head_dim]; `lengths` of the prompts, known to the host, sum to
    T -> [T, heads, head_dim]. `backend`: None lets torch choose."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    start = 0
    for length in lengths:
        tokens = slice(start, start + length)
        out[tokens] = _one(q[tokens], k[tokens], v[tokens], scale, backend)
        start += length
    assert start == len(q), f"prompts of {start} tokens in all, and q has {len(q)}"
    return out


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float, backend: SDPBackend | None) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, length, head_dim]
    shared = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend) if backend else nullcontext():
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
    return out[0].transpose(0, 1)
