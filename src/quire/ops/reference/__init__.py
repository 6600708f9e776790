"""The op set in plain torch: the specification that every kernel is tested against."""

from quire.ops.reference.opset import TorchOps

__all__ = ["TorchOps"]
