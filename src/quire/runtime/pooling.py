"""Hidden states of tokens become one embedding of the text, as in sentence-transformers.

One text at a time: sums do not depend on the batch."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from quire.ops.opset import Float32
from quire.weights.huggingface_checkpoint import read_tensors
from quire.weights.sentence_modules import DenseLayer, SentenceModules

PoolingMode = Literal["cls", "mean", "last"]

PoolingStep = Callable[[Float32], Float32]  # a vector becomes another


class Pooling:
    def __init__(self, mode: PoolingMode, steps: Sequence[PoolingStep] = ()) -> None:
        self.mode = mode
        self.steps = steps

    @classmethod
    def of(cls, modules: SentenceModules, default: PoolingMode, normalize: bool | None = None) -> "Pooling":
        """How texts are pooled, as the checkpoint says; `normalize` overrides it, and `default` is used where it says
        nothing."""
        steps: list[PoolingStep] = [unit_length if step is None else dense(step) for step in modules.steps]
        if normalize is not None:
            steps = [step for step in steps if step is not unit_length] + [unit_length] * normalize
        mode: PoolingMode = modules.pooling or default  # type: ignore[assignment]
        return cls(mode, steps)

    def __call__(self, rows: Float32) -> Float32:
        """rows [n, columns]: all tokens of the text, or the one that is wanted -> [columns]"""
        vector: Float32 = rows.mean(axis=0, dtype=np.float32) if self.mode == "mean" else rows[0].copy()
        for step in self.steps:
            vector = step(vector)
        return vector


def unit_length(vector: Float32) -> Float32:
    """A vector of zeros stays a vector of zeros."""
    length = np.float32(np.sqrt(np.dot(vector, vector)))
    return vector / max(length, np.float32(1e-12))


def dense(layer: DenseLayer) -> PoolingStep:
    tensors = read_tensors(layer.folder)
    tensors.expect_shape("linear.weight", layer.num_outputs, layer.num_inputs)
    weight, bias = tensors.floats("linear.weight"), None
    if layer.bias:
        tensors.expect_shape("linear.bias", layer.num_outputs)
        bias = tensors.floats("linear.bias")

    def step(vector: Float32) -> Float32:
        out: Float32 = weight @ vector
        out = out if bias is None else out + bias
        return np.tanh(out) if layer.activation == "tanh" else out

    return step
