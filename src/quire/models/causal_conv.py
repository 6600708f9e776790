"""The weights of causal convolutions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.ops.dequantize import dequantize
from quire.ops.opset import OpSet
from quire.ops.tensors import StoredTensor, stored_floats


@dataclass(frozen=True, slots=True)
class StoredConv:
    """The weight of a causal convolution: `name.weight` [channels, 1, taps], or [channels, taps] in GGUF files."""

    name: str
    channels: int
    taps: int
    flat: bool = False
    scales: tuple[tuple[int, float], ...] = ()  # of neighbouring channels: how many, and the factor of their inputs

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        middle = () if self.flat else (1,)
        yield f"{self.name}.weight", (self.channels, *middle, self.taps)

    def load(self, ops: OpSet, tensors: Sequence[StoredTensor]) -> Any:
        (tensor,) = tensors
        if all(factor == 1 for _, factor in self.scales):
            return ops.conv_weight(tensor)
        factors = np.repeat(*map(np.array, zip(*[(factor, count) for count, factor in self.scales], strict=True)))
        weights = dequantize(tensor).reshape(self.channels, self.taps) * factors[:, None].astype(np.float32)
        return ops.conv_weight(stored_floats(tensor.name, weights))
