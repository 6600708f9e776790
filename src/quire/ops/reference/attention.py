"""Attention, one sequence after the other: over pages, and without a cache."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quire.ops.opset import WORD_BITS
from quire.ops.reference.cache import TorchCache


def paged_attention(
    q: Tensor,
    cache: TorchCache,
    layer: int,
    seq_starts: Sequence[int],
    context_lens: Sequence[int],
    block_tables: Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    biases: Tensor | None = None,
    causal: bool = True,
    ancestors: Sequence[int] | None = None,
    positions: Sequence[int] = (),
    group: int = 0,
    skipped: int = 0,
) -> Tensor:
    """q [T, heads, head_dim] -> [T, heads, value_dim]. The queries of a sequence are its last positions. With
    `ancestors`, they are of a tree (see `StepBatch`): a query sees some places, as if there were no others."""
    out = q.new_empty(*q.shape[:2], cache.spec.value_dim)
    for seq, context_len in enumerate(context_lens):
        tokens = slice(seq_starts[seq], seq_starts[seq + 1])
        num_pages = -(-context_len // cache.spec.block_size)
        k, v = cache.read(layer, block_tables[seq, :num_pages], context_len)
        if group:  # a KV head for each query head
            kv_heads = (torch.arange(q.shape[1]) + skipped) // group
            k, v = k[:, kv_heads], v[:, kv_heads]
        scoring = (scale, window, softcap, slopes, sinks, causal, biases)
        if ancestors is None or len(out[tokens]) > WORD_BITS:
            out[tokens] = attention(q[tokens], k, v, *scoring)
            continue
        for token in range(tokens.start, tokens.stop):
            seen = seen_places(ancestors[token], positions[token], q.device)
            out[token] = attention(q[token : token + 1], k[seen], v[seen], *scoring)[0]
    return out


def seen_places(word: int, position: int, device: torch.device) -> Tensor:
    """All places before the tree of the token at this position, and those of the tree that its word has."""
    bits = [bit for bit in range(WORD_BITS) if word >> bit & 1]
    num_before = position + 1 - len(bits)
    own = [num_before + bit for bit in bits]
    return torch.tensor([*range(num_before), *own], device=device)


def self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_starts: Sequence[int],
    scale: float,
    causal: bool,
    window: int,
    biases: Tensor | None = None,
) -> Tensor:
    """q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads, head_dim]"""
    out = torch.empty_like(q)
    for start, end in pairwise(seq_starts):
        tokens = slice(start, end)
        out[tokens] = attention(q[tokens], k[tokens], v[tokens], scale, window, causal=causal, biases=biases)
    return out


def disentangled_attention(
    q: Tensor, k: Tensor, v: Tensor, by_query: Tensor, by_key: Tensor, rows: Tensor, seq_starts: Sequence[int],
    scale: float,
) -> Tensor:  # fmt: skip
    """q, k and v [T, heads, head_dim], by_query and by_key [T, heads, n], rows [2m + 1] -> [T, heads, head_dim]"""
    out = torch.empty_like(q)
    for start, end in pairwise(seq_starts):
        tokens = slice(start, end)
        places = torch.arange(end - start, device=q.device)
        table = rows[places[:, None] - places + len(rows) // 2]  # [n, n]: of query i and key j
        index = table.expand(q.shape[1], -1, -1)
        of_query = by_query[tokens].transpose(0, 1).gather(2, index)
        of_key = by_key[tokens].transpose(0, 1).gather(2, index.transpose(1, 2)).transpose(1, 2)
        scores = q[tokens].transpose(0, 1) @ k[tokens].permute(1, 2, 0) + of_query + of_key
        out[tokens] = ((scores * scale).softmax(dim=-1) @ v[tokens].transpose(0, 1)).transpose(0, 1)
    return out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    biases: Tensor | None = None,
) -> Tensor:
    """q [n, heads, head_dim], k [m, kv_heads, head_dim], v [m, kv_heads, value_dim], slopes and sinks [heads], biases
    [heads, 2 * reach + 1] -> [n, heads, value_dim].

    The queries stand at the last n of the m positions."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))  # [heads, m, head_dim]
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale  # [heads, n, m]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = distances(q.shape[0], k.shape[1], q.device)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    if biases is not None:
        reach = biases.shape[1] // 2
        scores = scores + biases[:, (-distance).clamp(-reach, reach) + reach]
    if not causal:
        distance = distance.abs()
    visible = distance >= 0
    if window > 0:
        visible &= distance < window
    elif window < 0:
        positions = torch.arange(k.shape[1], device=q.device)
        visible &= positions >= positions[-len(q) :, None] // -window * -window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return (scores.softmax(dim=-1)[..., : k.shape[1]] @ v).transpose(0, 1)


def distances(n: int, m: int, device: torch.device) -> Tensor:
    """[n, m]: from position j to the query at position m - n + i."""
    return torch.arange(m - n, m, device=device)[:, None] - torch.arange(m, device=device)
