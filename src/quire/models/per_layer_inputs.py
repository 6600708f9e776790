"""Per-layer embeddings of Gemma 3n and 4: every layer has an input of its own for each token.

It is a part of a second embedding of the token, plus a projection of its first. A layer multiplies a gate of its output
by it, and adds what that is projected to."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from quire.models.loading import Linear, TensorSpecs, Vector
from quire.ops.dequantize import dequantize
from quire.ops.opset import Activation, Keep, OpSet, Value
from quire.ops.tensors import PackedWeight, StoredTensor, stored_floats

TABLE = "model.embed_tokens_per_layer"


@dataclass(frozen=True, slots=True)
class PerLayerTable:
    """The second embedding: [num_stored, num_columns], in which tokens from `num_stored` on have the row of token 0."""

    num_rows: int
    num_stored: int
    num_columns: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{TABLE}.weight", (self.num_stored, self.num_columns)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        if self.num_rows <= self.num_stored:
            return ops.table(tensor)
        rows = np.zeros(self.num_rows, np.int32)
        rows[: self.num_stored] = np.arange(self.num_stored, dtype=np.int32)
        return ops.table(tensor.ordered(rows))


@dataclass(frozen=True, slots=True)
class ScaledLinear:
    """A linear layer of an input whose columns are multiplied by the vector `scale`, in floats."""

    name: str
    scale: str
    num_outputs: int
    num_inputs: int

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{self.name}.weight", (self.num_outputs, self.num_inputs)
        yield self.scale, (self.num_inputs,)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> PackedWeight:
        weight, scale = (dequantize(tensor) for tensor in tensors)
        scaled = weight.reshape(self.num_outputs, self.num_inputs) * scale.ravel()
        return ops.pack([stored_floats(self.name, scaled)], keep=Keep.ALL)


def top_specs(hidden: int, layers: int, size: int, vocab: int, num_stored: int) -> TensorSpecs:
    return {
        "layer_table": PerLayerTable(vocab, num_stored, layers * size),
        "layer_projection": Linear({"model.per_layer_model_projection": layers * size}, hidden),
        "layer_projection_norm": Vector("model.per_layer_projection_norm", size),
    }


def layer_specs(hidden: int, size: int) -> TensorSpecs:
    return {
        "input_gate": Linear({"per_layer_input_gate": size}, hidden),
        "input_projection": Linear({"per_layer_projection": hidden}, size),
        "input_norm": Vector("post_per_layer_input_norm", hidden),
    }


def per_layer_inputs(c: Any, w: Any, ops: OpSet, batch: Any, embedded: Value) -> tuple[Value, ...]:
    """For each layer, [T, c.input_size]. `embedded` [T, hidden]: the first embedding."""
    projected = ops.scale(ops.linear(embedded, w.layer_projection), 1 / sqrt(c.hidden))
    projected = ops.rms_norm(projected, w.layer_projection_norm, c.eps)
    table = ops.scale(ops.embedding(batch.ids, w.layer_table), sqrt(c.input_size))
    return ops.split(ops.scale(ops.add(projected, table), sqrt(0.5)), (c.input_size,) * c.layers)


def projected_input(ops: OpSet, x: Value, layer: Any, layer_input: Value, eps: float) -> Value:
    """What a layer adds to its output x: its own part of the second embedding, gated by x."""
    gate = ops.activate(ops.linear(x, layer.input_gate), Activation.GELU_TANH)
    return ops.rms_norm(ops.linear(ops.mul(gate, layer_input), layer.input_projection), layer.input_norm, eps)
