"""How well models predict a text: the loss of each, and how far its predictions are from those of the first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.executors.local import LocalExecutor
from quire.ops.opset import Float32, StepBatch


@dataclass(frozen=True, slots=True)
class TextScore:
    """Means over the tokens of a text, in nats."""

    loss: float  # -log p of the token that follows; perplexity is exp of it
    divergence: float  # KL(first || this): over the whole vocabulary
    same_top: float  # share of tokens whose most likely successor is that of the first


def score_text(executors: Sequence[Any], ids: Sequence[int], chunk: int) -> list[TextScore]:
    """Every token after the first of its chunk. No request may be in flight: blocks 0 and following are written."""
    sums = np.zeros((len(executors), 3))
    count = 0
    for start in range(0, len(ids) - 1, chunk):
        tokens = np.array(ids[start : start + chunk], np.int32)
        if len(tokens) < 2:
            break
        first: Float32 | None = None
        for index, executor in enumerate(executors):
            logprobs = _log_softmax(_logits(executor, tokens)[:-1])
            first = logprobs if first is None else first
            losses = -logprobs[np.arange(len(logprobs)), tokens[1:]]
            divergence = (np.exp(first) * (first - logprobs)).sum(axis=-1, dtype=np.float64)
            same = logprobs.argmax(axis=-1) == first.argmax(axis=-1)
            sums[index] += losses.sum(dtype=np.float64), max(divergence.sum(), 0.0), same.sum()
        count += len(tokens) - 1
    return [TextScore(*(float(value) / count for value in row)) for row in sums]


def _logits(executor: LocalExecutor, tokens: "np.ndarray[Any, np.dtype[np.int32]]") -> Float32:
    """[tokens, vocab]: one step over a sequence of these tokens."""
    length, block_size = len(tokens), executor.options.block_size
    places = np.arange(length, dtype=np.int32)
    blocks = np.arange(-(-length // block_size), dtype=np.int32)[None]
    starts, contexts = np.array([0, length], np.int32), np.array([length], np.int32)
    batch = StepBatch(tokens, places, places, starts, contexts, blocks, places)
    batch.states = np.array([(length, -1, 0)], np.int32)  # of models with state slots: from none to the first
    logits = executor.runner.program.run(batch)
    return np.asarray(logits.float().cpu() if hasattr(logits, "cpu") else logits)


def _log_softmax(logits: Float32) -> Float32:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Float32 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
