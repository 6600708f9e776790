"""The tensors of a directory as its files store them, in any container."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.dequantize import dequantize
from quire.ops.tensors import BF16, F8_E4M3, F8_E5M2, F16, F32, StoredTensor
from quire.weights.mapped_file import MappedFile, chained

FLOATS = {"F32": F32, "F16": F16, "BF16": BF16, "F8_E4M3": F8_E4M3, "F8_E5M2": F8_E5M2}
INTEGERS = {
    "I8": np.int8, "U8": np.uint8, "I16": np.int16, "I32": np.int32, "I64": np.int64, "BOOL": np.uint8,
    "F8_E8M0": np.uint8,  # powers of two: the exponent, plus 127
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RawEntry:
    """Where a tensor lies in its file. `dtype` is safetensors' name of it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int  # from the beginning of the file
    nbytes: int


class TensorFile(Protocol):
    @property
    def path(self) -> Path: ...

    @property
    def file(self) -> MappedFile: ...

    @property
    def entries(self) -> Mapping[str, RawEntry]:
        """The entries of all tensors, in the order of the file."""


class RawTensors:
    """Tensors by name, from one or several files. Errors name the file and the tensor."""

    def __init__(self, path: Path, files: Mapping[str, TensorFile]) -> None:
        self.path = path
        self._files = files
        self._mapped = chained(file.file for file in files.values())

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """The names of all tensors, in the order of the files."""
        return list(self._files)

    def nbytes(self, name: str) -> int:
        return self._entry(name).nbytes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape or (1,)  # a scalar is a vector of one

    def dtype(self, name: str) -> str:
        return self._entry(name).dtype

    def tensor(self, name: str) -> StoredTensor:
        """Floats, as a view of the mapped file."""
        kind = FLOATS.get(self.dtype(name))
        if kind is None:
            raise Unsupported(
                f"{self._files[name].path}: tensor {name!r} is stored as {self.dtype(name)}",
                f"weights without a quantization_config are {', '.join(FLOATS)}",
            )
        shape = self.shape(name)
        rows = self._files[name].file.rows(self._entry(name).offset, prod(shape[:-1]), shape[-1] * kind.block_bytes)
        return StoredTensor(name, shape, kind, rows)

    def drop_pages(self) -> None:
        for file in self._mapped:
            file.drop_pages()

    def floats(self, name: str) -> NDArray[np.float32]:
        """A tensor's values as fp32, in its shape."""
        return dequantize(self.tensor(name)).reshape(self.shape(name))

    def integers(self, name: str) -> NDArray[Any]:
        """A tensor's integers as a view, in its shape and type."""
        kind = INTEGERS.get(self.dtype(name))
        if kind is None:
            raise self.bad(name, f"is stored as {self.dtype(name)}, and integers are expected")
        entry = self._entry(name)
        return self._files[name].file.rows(entry.offset, 1, entry.nbytes).view(kind).reshape(self.shape(name))

    def expect_shape(self, name: str, *expected: int) -> None:
        if (shape := self.shape(name)) != expected:
            raise self.bad(name, f"is {[*shape]}, and the tensors beside it ask for {[*expected]}")

    def bad(self, name: str, problem: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._files[name].path}: tensor {name!r} {problem}")

    def _entry(self, name: str) -> RawEntry:
        if name not in self._files:
            raise BadCheckpoint(f"{self.path} has no tensor {name!r}")
        return self._files[name].entries[name]
