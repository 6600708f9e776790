"""Gates of the output of attention: each column, or each head, times the sigmoid of a linear layer of the input."""

from quire.ops.opset import Activation, OpSet, Value


def mul_sigmoid(ops: OpSet, x: Value, gate: Value) -> Value:
    """x [T, n] * sigmoid(gate [T, n]), where sigmoid(g) is (1 + tanh(g / 2)) / 2."""
    tanh = ops.activate(ops.scale(gate, 0.5), Activation.TANH)
    return ops.scale(ops.add(x, ops.mul(x, tanh)), 0.5)
