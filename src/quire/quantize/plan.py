"""What a run will write: files whose layout is known, and a task for each weight of the source."""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import QuireError
from quire.quantize.output import FileLayout, Pieces, PlannedTensor

Floats = NDArray[np.float32]


class QuantizeError(QuireError):
    """The command asks for what cannot be done with this model."""

    status, code = 400, "quantize"


@dataclass(frozen=True, slots=True)
class Importance:
    """Mean squares of the inputs of linear layers, by the name of their stored weight. `counts`: tokens seen."""

    sums: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    source: str = ""  # the text or file it comes from
    largest: Mapping[str, float] = field(default_factory=dict)  # magnitudes of inputs
    kv_largest: Mapping[int, tuple[float, float]] = field(default_factory=dict)  # of keys and values, by layer

    def of(self, name: str) -> Floats | None:
        """[inputs]; None for a layer whose inputs were never seen."""
        if not self.counts.get(name) or name not in self.sums:
            return None
        return (self.sums[name] / np.float32(self.counts[name])).astype(np.float32)

    def __bool__(self) -> bool:
        return bool(self.sums)


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The options that the bytes of the output depend on, besides the source and the method."""

    method: str
    ignore: tuple[str, ...] = ()
    dtype: str | None = None  # of tensors that are quantized in the source and are not in the output
    pure: bool = False
    head_type: str | None = None
    table_type: str | None = None
    requantize: bool = False
    lora: str | None = None
    types: tuple[tuple[str, str], ...] = ()  # a mix: the format of tensors by name, where it is not the method's own
    split_bytes: int | None = None  # of GGUF: the most that one file has
    keep_split: bool = False  # of GGUF: as many files as the source has
    kv_scales: bool = False  # of compressed-tensors: scales of an fp8 KV cache
    patterns: tuple[tuple[str, str], ...] = ()  # regex -> the format of tensors whose names it finds; the first counts
    overrides: tuple[tuple[str, bool | int | float | str], ...] = ()  # of GGUF: keys that get another value
    smoothing_strength: float = 0.5  # of SmoothQuant
    pruned: tuple[int, ...] = ()  # of GGUF: layers that are left out

    def named_format(self, name: str) -> str | None:
        """The format that a pattern gives the tensor."""
        return next((kind for pattern, kind in self.patterns if re.search(pattern, name)), None)


@dataclass(frozen=True, slots=True)
class Task:
    """A weight of the source and what becomes of it."""

    outputs: tuple[PlannedTensor, ...]
    num_weights: int
    pieces: Pieces
    type: str  # as a table of types counts it
    published: tuple[str, ...] = ()  # names in Hugging Face's layout
    finish: Callable[[], None] | None = None  # lets go of pages that were read

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.outputs)

    def is_in(self, tensors: Container[str]) -> bool:
        """Whether all its outputs are among the names."""
        return all(tensor.name in tensors for tensor in self.outputs)


@dataclass(frozen=True, slots=True)
class WritePlan:
    out: Path
    files: Sequence[FileLayout]
    tasks: Sequence[Task]
    small: Mapping[str, bytes] | None = None  # further files of a folder
    notes: Sequence[str] = ()  # what the user should know

    @property
    def tensors(self) -> Sequence[PlannedTensor]:
        return [tensor for task in self.tasks for tensor in task.outputs]

    @property
    def nbytes(self) -> int:
        return sum(task.nbytes for task in self.tasks)

    @property
    def written_bytes(self) -> int:
        """With headers and further files."""
        return sum(file.size for file in self.files) + sum(map(len, (self.small or {}).values()))

    @property
    def num_weights(self) -> int:
        return sum(task.num_weights for task in self.tasks)

    @property
    def bits_a_weight(self) -> float:
        return 8 * self.nbytes / max(self.num_weights, 1)

    def types(self) -> dict[str, tuple[int, int]]:
        """Type -> tensors and weights of it, most weights first."""
        counts: dict[str, tuple[int, int]] = {}
        for task in self.tasks:
            tensors, weights = counts.get(task.type, (0, 0))
            counts[task.type] = (tensors + 1, weights + task.num_weights)
        return dict(sorted(counts.items(), key=lambda item: -item[1][1]))


def count(shape: Sequence[int]) -> int:
    return prod(shape)


def source_state(path: Path) -> list[Any]:
    """Names, sizes and times of the files of the source: a resumed run must find the same."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
