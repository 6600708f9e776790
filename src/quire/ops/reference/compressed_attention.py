"""Compressed attention (DeepSeek V4): groups of tokens are pooled into entries, and queries attend to the tokens in a
window and to entries."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.ops.kv_spec import CompressedLayer
from quire.ops.reference.cache import TorchCache

if TYPE_CHECKING:
    from quire.ops.reference.program import TorchBatch


def layer_of(cache: TorchCache, layer: int) -> CompressedLayer:
    assert cache.spec.compressed is not None
    return cache.spec.compressed.layers[layer]


def sequences(batch: "TorchBatch") -> Iterator[tuple[slice, Tensor, Tensor]]:
    """-> the rows of each sequence, their positions, and its block table"""
    for seq, context_len in enumerate(batch.context_lens):
        rows = slice(batch.seq_starts[seq], batch.seq_starts[seq + 1])
        yield rows, torch.arange(context_len - (rows.stop - rows.start), context_len), batch.block_tables[seq]


def pool_group(batch: "TorchBatch", layer: int, first: int, columns: int, bias: Tensor, overlap: bool) -> Tensor:
    """-> [T, columns]: zeros for tokens that end no group"""
    cache, group = batch.cache, layer_of(batch.cache, layer).group
    stored = (2 if overlap else 1) * columns
    out = torch.zeros(int(batch.seq_starts[-1]), columns)
    for rows, positions, table in sequences(batch):
        for end in positions[(positions + 1) % group == 0].tolist():
            before = group if overlap and end >= 2 * group - 1 else 0
            tokens = cache.read_tokens(layer, table, torch.arange(end + 1 - group - before, end + 1))
            values, gates = tokens[:, first : first + 2 * stored].chunk(2, dim=1)
            values, gates = values.unflatten(0, (-1, group)), gates.unflatten(0, (-1, group)) + bias
            if overlap:  # of the group before, the first half of the columns; of the group itself, the other
                halves = [x.unflatten(2, (2, columns)) for x in (values, gates)]
                values, gates = (torch.cat([*x[:-1, :, 0], x[-1, :, 1]]) for x in halves)
            pooled = (values.flatten(0, -2) * gates.flatten(0, -2).softmax(dim=0)).sum(dim=0)
            out[rows.start + end - int(positions[0])] = pooled
    return out


def write_entry(x: Tensor, batch: "TorchBatch", layer: int, part: int) -> None:
    group = layer_of(batch.cache, layer).group
    for rows, positions, table in sequences(batch):
        ends = (positions + 1) % group == 0
        batch.cache.write_entries(layer, table, positions[ends] // group, part, x[rows][ends])


def top_entries(q: Tensor, weights: Tensor, batch: "TorchBatch", layer: int, top_k: int) -> Tensor:
    """q [T, heads, columns], weights [T, heads] -> [T, top_k] entries in ascending order, then -1"""
    out = q.new_full((len(q), top_k), -1)
    for rows, positions, table in sequences(batch):
        counts = (positions + 1) // layer_of(batch.cache, layer).group
        keys = batch.cache.read_entries(layer, table, int(counts[-1]), 1)
        for row, seen in zip(range(rows.start, rows.stop), counts.tolist(), strict=True):
            if seen <= top_k:
                out[row, :seen] = torch.arange(seen)
                continue
            scores = weights[row] @ torch.relu(q[row] @ keys[:seen].T)
            scores = scores.masked_fill(scores.isnan(), -torch.inf)
            out[row] = scores.argsort(descending=True, stable=True)[:top_k].sort().values
    return out


def compressed_attention(
    q: Tensor, batch: "TorchBatch", layer: int, scale: float, window: int, sinks: Tensor, chosen: Tensor | None
) -> Tensor:
    """q [T, heads, head_dim] -> [T, heads, head_dim]"""
    out, head_dim, group = torch.empty_like(q), q.shape[2], layer_of(batch.cache, layer).group
    for rows, positions, table in sequences(batch):
        first = max(int(positions[0]) - window + 1, 0)
        seen = torch.arange(first, int(positions[-1]) + 1)
        keys = batch.cache.read_tokens(layer, table, seen)[:, :head_dim]
        visible = (seen <= positions[:, None]) & (seen > positions[:, None] - window)
        if group:
            counts = (positions + 1) // group
            entries = torch.arange(int(counts[-1]))
            own = entries < counts[:, None]
            if chosen is not None:
                own &= (chosen[rows].long()[:, :, None] == entries).any(dim=1)
            keys = torch.cat([keys, batch.cache.read_entries(layer, table, len(entries), 0)])
            visible = torch.cat([visible, own], dim=1)
        scores = (q[rows].transpose(0, 1) @ keys.T * scale).masked_fill(~visible, -torch.inf)  # [heads, T, keys]
        with_sinks = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], 1)], dim=2)
        out[rows] = (with_sinks.softmax(dim=2)[:, :, :-1] @ keys).transpose(0, 1)
    return out
