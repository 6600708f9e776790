"""Gates of the output of attention: each column, or each head, times the sigmoid of a linear layer of the input."""

from quire.ops.opset import Activation, OpSet, Value


def mul_sigmoid(ops: OpSet, x: Value, gate: Value) -> Value:
    """x [T, n] * sigmoid(gate [T, n])."""
    return ops.mul(x, ops.activate(gate, Activation.SIGMOID))
