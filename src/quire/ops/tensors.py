"""Matrices as a checkpoint stores them, and as kernels want them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StorageType:
    """How a run of weights is stored: `block` weights in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


F32 = StorageType("F32", 1, 4)
F16 = StorageType("F16", 1, 2)
BF16 = StorageType("BF16", 1, 2)
Q4_0 = StorageType("Q4_0", 32, 18)
Q4_1 = StorageType("Q4_1", 32, 20)
Q5_0 = StorageType("Q5_0", 32, 22)
Q5_1 = StorageType("Q5_1", 32, 24)
Q8_0 = StorageType("Q8_0", 32, 34)
Q2_K = StorageType("Q2_K", 256, 84)
Q3_K = StorageType("Q3_K", 256, 110)
Q4_K = StorageType("Q4_K", 256, 144)
Q5_K = StorageType("Q5_K", 256, 176)
Q6_K = StorageType("Q6_K", 256, 210)
IQ4_NL = StorageType("IQ4_NL", 32, 18)
IQ4_XS = StorageType("IQ4_XS", 256, 136)
MXFP4 = StorageType("MXFP4", 32, 17)

_FLOATS = (F32, F16, BF16)
_INTEGERS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)
_CODEBOOKS = (IQ4_NL, IQ4_XS, MXFP4)
STORAGE_TYPES = {t.name: t for t in (*_FLOATS, *_INTEGERS, *_CODEBOOKS)}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor of a checkpoint, still in the file's bytes and usually still in the file's pages.

    `data` is uint8 [rows, row_bytes], the rows being all axes but the last, flattened. `row_order`, where given,
    lists the stored row that each row of the tensor is to be taken from: a permutation that a reader undoes."""

    name: str
    shape: tuple[int, ...]
    type: StorageType
    data: NDArray[np.uint8]
    row_order: NDArray[np.int32] | None = None
    dummy: bool = False  # nobody's weights, for measuring: `data` is one row over and over

    @property
    def num_rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def num_columns(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [num_outputs, num_inputs] (with its bias) ready for one backend's kernels; nobody else looks inside."""

    num_outputs: int
    num_inputs: int
    nbytes: int
    packed: Any
    bias: Any = None
