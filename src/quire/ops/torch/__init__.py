"""The op set in plain torch: what every kernel is measured against."""

from quire.ops.torch.ops import TorchOps

__all__ = ["TorchOps"]
