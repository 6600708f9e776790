"""Causal attention of whole sequences in numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.quantize.floats import Floats

QUERY_BLOCK = 128  # queries whose scores are computed at once
HEADS = 4  # at most, of those that share keys


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    slopes: Floats | None = None
    sinks: Floats | None = None

    def attend(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """Causal attention of one sequence: q [T, heads * head_dim], k and v [T, kv_heads * ...]"""
        length = len(q)
        queries, keys = (x.reshape(length, -1, self.head_dim) for x in (q, k))
        values = v.reshape(length, keys.shape[1], -1)
        num_heads, shared = queries.shape[1], queries.shape[1] // keys.shape[1]
        out = np.empty((length, num_heads, values.shape[2]), np.float32)
        for first in range(0, length, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, length)  # no query sees what follows
            whole = 0 if self.window else first  # keys before it are seen by all queries of the block
            hidden = self._hidden(np.arange(first, last)[:, None], np.arange(whole, last))
            for head in range(0, num_heads, shared):
                for start in range(head, head + shared, HEADS):
                    heads, stored = slice(start, min(start + HEADS, head + shared)), head // shared
                    query: Floats = queries[first:last, heads] * np.float32(self.scale)
                    scores: Floats = query.reshape(-1, self.head_dim) @ keys[:last, stored].T
                    scores = scores.reshape(last - first, -1, last)
                    weights = self._softmax(scores, heads, first, hidden).reshape(-1, last)
                    out[first:last, heads] = (weights @ values[:last, stored]).reshape(last - first, -1, out.shape[2])
        return out.reshape(length, -1)

    def _hidden(self, queries: NDArray[Any], keys: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether a key follows a query, or is before its window or chunk."""
        hidden: NDArray[np.bool_] = keys > queries
        if self.window:
            first = queries // -self.window * -self.window if self.window < 0 else queries - self.window + 1
            hidden |= keys < first
        return hidden

    def _softmax(self, scores: Floats, heads: slice, first: int, hidden: NDArray[np.bool_]) -> Floats:
        """Attention weights [queries, heads, keys], in place: scores are capped, biased and masked before their
        softmax. `first`: query; `hidden`: of the last keys."""
        if self.softcap:
            scores = np.float32(self.softcap) * np.tanh(scores / np.float32(self.softcap))
        if self.slopes is not None:
            distance = np.arange(first, first + len(scores))[:, None, None] - np.arange(scores.shape[2])
            scores -= self.slopes[heads, None] * distance.astype(np.float32)
        np.copyto(scores[..., -hidden.shape[1] :], -np.inf, where=hidden[:, None])
        highest = scores.max(2, keepdims=True)
        if self.sinks is not None:
            highest = np.maximum(highest, self.sinks[heads, None])
        np.exp(np.subtract(scores, highest, out=scores), out=scores)
        total = scores.sum(2, keepdims=True)
        if self.sinks is not None:
            total += np.exp(self.sinks[heads, None] - highest)
        scores /= total
        return scores
