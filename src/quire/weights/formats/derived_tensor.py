"""A weight that is derived from several stored tensors when it is read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import F32, StoredTensor
from quire.weights.raw import RawTensors


@dataclass(frozen=True, slots=True, eq=False)
class DerivedTensor:
    shape: tuple[int, ...]
    sources: tuple[str, ...]  # the stored tensors it is derived from, and others of its module that are not needed
    derive: Callable[[], StoredTensor]


def modules_with(raw: RawTensors, suffix: str) -> Iterator[str]:
    """The module of every tensor with the suffix: "mlp.up_proj" of "mlp.up_proj.qweight"."""
    for name in raw.names():
        if name.endswith(suffix):
            yield name.removesuffix(suffix)


def module_tensors(raw: RawTensors, module: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors of a module that the checkpoint has."""
    return tuple(name for suffix in suffixes if (name := module + suffix) in raw)


def plain_floats(name: str, values: NDArray[np.float32]) -> StoredTensor:
    """fp32, where no block layout fits: the row length or the group size is not a multiple of 32."""
    rows = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(values.shape[0], -1)
    return StoredTensor(name, values.shape, F32, rows)
