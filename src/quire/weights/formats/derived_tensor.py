"""A weight that is made of several tensors of a checkpoint when it is asked for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import F32, StoredTensor
from quire.weights.raw import RawTensors


@dataclass(frozen=True, slots=True, eq=False)
class MadeTensor:
    shape: tuple[int, ...]
    parts: tuple[str, ...]  # the names it is made of, or that belong to it and are not needed
    make: Callable[[], StoredTensor]


def modules_with(raw: RawTensors, suffix: str) -> Iterator[str]:
    """Of "model.layers.0.mlp.up_proj.qweight" with the suffix ".qweight", "model.layers.0.mlp.up_proj"."""
    for name in raw.names():
        if name.endswith(suffix):
            yield name.removesuffix(suffix)


def parts_of(raw: RawTensors, module: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for suffix in suffixes if (name := module + suffix) in raw)


def plain_floats(name: str, values: NDArray[np.float32]) -> StoredTensor:
    """Where no packed layout fits: rows of a length that is no multiple of 32, or groups that are not."""
    rows = np.ascontiguousarray(values, np.float32).view(np.uint8).reshape(values.shape[0], -1)
    return StoredTensor(name, values.shape, F32, rows)
