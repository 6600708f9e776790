"""Gates of the output of attention: each column, or each head, times an activated linear layer of the input."""

import numpy as np

from quire.models.loading import Linear, LinearPart
from quire.ops.opset import Activation, OpSet, Value


def head_gate(name: str, heads: int, head_dim: int, hidden: int) -> Linear:
    """A linear layer with one output a head, which becomes that of each column of the head."""
    repeated = np.repeat(np.arange(heads, dtype=np.int32), head_dim)
    return Linear({name: LinearPart(heads * head_dim, repeated, num_stored=heads)}, hidden)


def mul_sigmoid(ops: OpSet, x: Value, gate: Value) -> Value:
    """x [T, n] * sigmoid(gate [T, n])."""
    return mul_activated(ops, x, gate, Activation.SIGMOID)


def mul_activated(ops: OpSet, x: Value, gate: Value, kind: Activation) -> Value:
    """x [T, n] * activation(gate [T, n])."""
    return ops.mul(x, ops.activate(gate, kind))
