"""Launches of the sampler that are repeated become CUDA graphs: then they cost the host a copy and a replay."""

from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from quire.ops.opset import Int32

CAPTURED_AT = 3  # uses: what is rare is not captured
MAX_GRAPHS = 256
MAX_COUNTED = 4096  # launches that are not captured yet


class LaunchGraphs:
    """A key says all that a launch depends on but the numbers in its inputs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uses: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}  # with inputs and outputs
        self._pool: tuple[int, int] | None = None

    def run(self, key: Hashable, inputs: Int32, launch: Callable[[Tensor], Tensor]) -> Tensor:
        """launch(inputs on the device), which must not wait. Its result is valid until the key is run again."""
        host = torch.from_numpy(inputs)
        if self._device.type != "cuda":
            return launch(host)
        host = host.pin_memory()
        if key not in self._graphs:
            if not self._is_repeated(key):
                return launch(host.to(self._device, non_blocking=True))
            self._graphs[key] = self._capture(torch.empty_like(host, device=self._device), launch)
        graph, of_graph, result = self._graphs[key]
        of_graph.copy_(host, non_blocking=True)
        graph.replay()
        return result

    def is_captured(self, key: Hashable) -> bool:
        """Whether `run` replays a graph; where there are none, whether it launches at all."""
        return key in self._graphs or self._device.type != "cuda"

    def _is_repeated(self, key: Hashable) -> bool:
        if len(self._uses) >= MAX_COUNTED:
            self._uses.clear()
        self._uses[key] += 1
        return self._uses[key] >= CAPTURED_AT and len(self._graphs) < MAX_GRAPHS

    def _capture(
        self, inputs: Tensor, launch: Callable[[Tensor], Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """Not with `torch.cuda.graph`, which collects garbage and waits for the device. Other threads may copy."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = launch(inputs)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        self._pool = graph.pool()
        return graph, inputs, result
