"""Causal attention of whole sequences in numpy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.quantize.floats import Floats

QUERY_BLOCK = 128  # queries whose scores are computed at once


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
        queries = q.reshape(length, -1, self.head_dim).swapaxes(0, 1)
        keys = k.reshape(length, -1, self.head_dim).swapaxes(0, 1)
        values = v.reshape(length, len(keys), -1).swapaxes(0, 1)
        shared = len(queries) // len(keys)
        out = np.empty((length, len(queries), values.shape[2]), np.float32)
        for first in range(0, length, QUERY_BLOCK):
            last = min(first + QUERY_BLOCK, length)  # no query sees what follows
            distance = np.arange(first, last)[:, None] - np.arange(last)
            hidden = (distance < 0) | self._is_behind(np.arange(first, last)[:, None], np.arange(last))
            for head, query in enumerate(queries):
                scores = query[first:last] @ keys[head // shared, :last].T
                out[first:last, head] = self._softmax(scores, head, distance, hidden) @ values[head // shared, :last]
        return out.reshape(length, -1)

    def _is_behind(self, queries: NDArray[Any], keys: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether a key is before the window, or before the chunk, of a query."""
        first = queries // -self.window * -self.window if self.window < 0 else queries - (self.window or len(keys)) + 1
        behind: NDArray[np.bool_] = keys < first
        return behind

    def _softmax(self, scores: Floats, head: int, distance: NDArray[Any], hidden: NDArray[np.bool_]) -> Floats:
        """Attention weights of one head, in place: scores are scaled, capped, biased and masked before their
        softmax."""
        scores *= np.float32(self.scale)
        if self.softcap:
            scores = np.float32(self.softcap) * np.tanh(scores / np.float32(self.softcap))
        if self.slopes is not None:
            scores -= self.slopes[head] * distance.astype(np.float32)
        scores[hidden] = -np.inf
        highest = scores.max(1, keepdims=True)
        if self.sinks is not None:
            highest = np.maximum(highest, self.sinks[head])
        np.exp(np.subtract(scores, highest, out=scores), out=scores)
        total = scores.sum(1, keepdims=True)
        if self.sinks is not None:
            total += np.exp(self.sinks[head] - highest)
        scores /= total
        return scores
