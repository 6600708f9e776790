"""A forward pass of one size, captured as a CUDA graph."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.ops.gpu.graph_inputs import GraphInputs


class WeakTensor:
    """A tensor whose memory is not held: graphs captured later may use it. Valid until another graph is replayed."""

    def __init__(self, tensor: Tensor) -> None:
        self._dtype = tensor.dtype
        kind = {2: "<i2", 4: "<i4"}[tensor.element_size()]
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.element_size() for stride in tensor.stride()),
            "typestr": kind,
            "version": 2,
        }

    def tensor(self, device: torch.device) -> Tensor:
        return torch.as_tensor(self, device=device).view(self._dtype)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    inputs: GraphInputs
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # valid until another graph is replayed
    kept: Tensor | None  # the same, of all tokens
    forward: object  # what was captured: a communicator that the graph has a part of must outlive it

    def __del__(self) -> None:
        self.graph.reset()

    def milliseconds(self) -> float:
        """The time of a step of this size with empty contexts."""
        times: list[float] = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return min(times)
