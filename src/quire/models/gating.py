"""Gates of the output of attention: each column, or each head, times an activated linear layer of the input."""

from quire.ops.opset import Activation, OpSet, Value


def mul_sigmoid(ops: OpSet, x: Value, gate: Value) -> Value:
    """x [T, n] * sigmoid(gate [T, n])."""
    return mul_activated(ops, x, gate, Activation.SIGMOID)


def mul_activated(ops: OpSet, x: Value, gate: Value, kind: Activation) -> Value:
    """x [T, n] * activation(gate [T, n])."""
    return ops.mul(x, ops.activate(gate, kind))
