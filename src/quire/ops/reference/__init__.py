"""The op set in plain torch: what every kernel is measured against."""

from quire.ops.reference.opset import TorchOps

__all__ = ["TorchOps"]
