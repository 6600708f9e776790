"""Sparse attention (DSA): the positions that an indexer chooses, and attention to these alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.ops.reference.cache import TorchCache


def top_positions(
    q: Tensor,
    weights: Tensor,
    cache: TorchCache,
    layer: int,
    seq_starts: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,
) -> Tensor:
    """q [T, heads, columns], weights [T, heads] -> [T, top_k] positions in ascending order, then -1."""
    assert cache.spec.index is not None
    top_k = cache.spec.index.top_k
    out = q.new_full((len(q), top_k), -1)
    for seq, context_len in enumerate(context_lens):
        num_pages = -(-context_len // cache.spec.block_size)
        keys = cache.read_index_keys(layer, block_tables[seq, :num_pages], context_len)
        for token in range(seq_starts[seq], seq_starts[seq + 1]):
            seen = context_len - (seq_starts[seq + 1] - 1 - token)
            if seen <= top_k:
                out[token, :seen] = torch.arange(seen, device=q.device)
                continue
            scores = weights[token] @ torch.relu(q[token] @ keys[:seen].T)
            scores = scores.masked_fill(scores.isnan(), -torch.inf)
            best = scores.argsort(descending=True, stable=True)[:top_k]  # the lower position of equals
            out[token] = best.sort().values
    return out


def sparse_attention(
    q: Tensor,
    cache: TorchCache,
    layer: int,
    seq_starts: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,
    scale: float,
    chosen: Tensor,
) -> Tensor:
    """q [T, heads, head_dim], chosen [T, top_k] -> [T, heads, value_dim]"""
    out = q.new_empty(*q.shape[:2], cache.spec.value_dim)
    for seq, context_len in enumerate(context_lens):
        num_pages = -(-context_len // cache.spec.block_size)
        k, v = cache.read(layer, block_tables[seq, :num_pages], context_len)
        tokens = slice(seq_starts[seq], seq_starts[seq + 1])
        own = chosen[tokens].long()
        keys, values = (x[own.clamp(min=0), 0] for x in (k, v))  # [tokens, top_k, columns]
        scores = q[tokens] @ keys.transpose(1, 2) * scale
        out[tokens] = scores.masked_fill(own[:, None] < 0, -torch.inf).softmax(dim=-1) @ values
    return out
