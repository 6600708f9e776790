"""Tensors as a checkpoint stores them, and packed for kernels."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class StorageType:
    """How weights are stored: `block` weights in `block_bytes` bytes."""

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
IQ1_S = StorageType("IQ1_S", 256, 50)
IQ1_M = StorageType("IQ1_M", 256, 56)
IQ2_XXS = StorageType("IQ2_XXS", 256, 66)
IQ2_XS = StorageType("IQ2_XS", 256, 74)
IQ2_S = StorageType("IQ2_S", 256, 82)
IQ3_XXS = StorageType("IQ3_XXS", 256, 98)
IQ3_S = StorageType("IQ3_S", 256, 110)
TQ1_0 = StorageType("TQ1_0", 256, 54)
TQ2_0 = StorageType("TQ2_0", 256, 66)
NVFP4 = StorageType("NVFP4", 64, 36)

# Blocks that GGUF does not have. Readers of other formats convert to them (weights/blocks.py).
Q4_Z = StorageType("Q4_Z", 32, 20)  # fp16 scale, fp16 zero point, nibbles: scale * (q - zero)
Q4_F = StorageType("Q4_F", 32, 24)  # fp32 scale and offset, nibbles: scale * q + offset
Q8_F = StorageType("Q8_F", 32, 36)  # fp32 scale, int8 values
Q8_M = StorageType("Q8_M", 32, 40)  # fp32 scale and offset, int8 values
NF4 = StorageType("NF4", 32, 20)  # fp32 scale, nibbles that index bitsandbytes' codebook
FP4 = StorageType("FP4", 32, 20)
F8_E4M3 = StorageType("F8_E4M3", 1, 1)
F8_E5M2 = StorageType("F8_E5M2", 1, 1)
FP8 = StorageType("FP8", 32, 36)  # fp32 scale, e4m3 floats

_FLOATS = (F32, F16, BF16)
_INTEGERS = (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, TQ1_0, TQ2_0)
_CODEBOOKS = (IQ4_NL, IQ4_XS, MXFP4, NVFP4)
_GRIDS = (IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S)
GGUF_TYPES = {t.name: t for t in (*_FLOATS, *_INTEGERS, *_CODEBOOKS, *_GRIDS)}
STORAGE_TYPES = GGUF_TYPES | {t.name: t for t in (Q4_Z, Q4_F, Q8_F, Q8_M, NF4, FP4, F8_E4M3, F8_E5M2, FP8)}


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One tensor of a checkpoint, in the bytes of the file and usually still memory-mapped.

    `data` is uint8 [rows, row_bytes]; rows are all axes but the last, flattened. `row_order`: row i of the tensor is
    the stored row row_order[i]. `column_order`: stored column i is column column_order[i] of the tensor (act-order); a
    matmul takes its inputs in that order. `threshold`: backends that quantize activations to 8 bits leave inputs of
    this magnitude and more in floats; 0: they quantize all. `activations`: "int8" or "fp8" where the checkpoint is made
    for inputs that are quantized to it, a scale a token; backends may do so."""

    name: str
    shape: tuple[int, ...]
    type: StorageType
    data: NDArray[np.uint8]
    row_order: NDArray[np.int32] | None = None
    dummy: bool = False  # random weights, for benchmarks: `data` is one row over and over
    column_order: NDArray[np.int32] | None = None
    threshold: float = 0.0
    activations: str = ""

    @property
    def num_rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def num_columns(self) -> int:
        return self.shape[-1]

    def part(self, first: int, count: int) -> "StoredTensor":
        """`count` entries along the first axis: some rows, or the matrices of one expert."""
        shape = (count, *self.shape[1:])
        if len(shape) == 1:
            return replace(self, shape=shape, data=self._elements()[first : first + count].reshape(1, -1))
        rows = self.num_rows // self.shape[0]
        inside = slice(first * rows, (first + count) * rows)
        if self.row_order is None:
            return replace(self, shape=shape, data=self.data[inside])
        return replace(self, shape=shape, data=self.data[self.row_order[inside]], row_order=None)

    def squeezed(self) -> "StoredTensor":
        """Drop the first axis, which has one entry."""
        assert self.shape[0] == 1
        return replace(self, shape=self.shape[1:])

    def ordered(self, order: NDArray[np.int32]) -> "StoredTensor":
        """Entry i along the first axis is entry order[i]; `order` may leave some out."""
        shape = (len(order), *self.shape[1:])
        if len(shape) == 1:
            return replace(self, shape=shape, data=self._elements()[order].reshape(1, -1))
        assert len(shape) == 2
        rows = order if self.row_order is None else self.row_order[order]
        if len(order) == self.num_rows:
            return replace(self, row_order=rows)
        return replace(self, shape=shape, data=self.data[rows], row_order=None)

    def transposed(self) -> "StoredTensor":
        """Swap the last two axes. The bytes are copied."""
        *outer, rows, columns = self.shape
        size = self._element_size()
        if self.dummy:
            data = np.broadcast_to(np.resize(self.data[0], rows * size), (self.num_rows // rows * columns, rows * size))
            return replace(self, shape=(*outer, columns, rows), data=data, row_order=None)
        data = self.data if self.row_order is None else self.data[self.row_order]
        swapped = data.reshape(-1, rows, columns, size).swapaxes(1, 2)
        shape = (*outer, columns, rows)
        return replace(self, shape=shape, data=swapped.reshape(-1, rows * size), row_order=None)

    def _element_size(self) -> int:
        if self.type.block != 1:
            raise Unsupported(
                f"tensor {self.name!r} is stored in {self.type.name}, and has to be split by columns",
                "keep it in floats",
            )
        return self.type.block_bytes

    def _elements(self) -> NDArray[np.uint8]:
        """A tensor of one axis as [elements, element_bytes]"""
        return self.data.reshape(-1, self._element_size())


def stored_floats(name: str, values: NDArray[np.float32]) -> StoredTensor:
    """Computed values as a stored tensor."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    return StoredTensor(name, values.shape, F32, values.reshape(-1, values.shape[-1]).view(np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class LinearLayer:
    """A linear layer of the published model that is part of a packed matrix."""

    name: str  # without `.weight`
    num_outputs: int  # in the packed matrix
    num_stored: int  # in the checkpoint
    order: NDArray[np.int32] | None = None  # output i in the packed matrix is its stored output order[i]; None: i


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix [num_outputs, num_inputs] (with its bias), packed for one backend's kernels: only it looks inside."""

    num_outputs: int
    num_inputs: int
    nbytes: int
    packed: Any
    bias: Any = None
    layers: tuple[LinearLayer, ...] = ()  # whose outputs are stacked in it; empty: unknown


@dataclass(frozen=True, slots=True, eq=False)
class LoraDelta:
    """What a LoRA adapter adds to a matrix [outputs, inputs]: scale * b @ a."""

    a: StoredTensor  # [rank, inputs], floats
    b: StoredTensor  # [outputs, rank], floats
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """A matrix [num_outputs, num_inputs] for each expert, packed for one backend's kernels."""

    num_experts: int
    num_outputs: int
    num_inputs: int
    nbytes: int
    packed: Any
    biases: Any = None  # [num_experts, num_outputs]


@dataclass(frozen=True, slots=True, eq=False)
class PackedHeads:
    """A matrix [num_outputs, num_inputs] for each head, in floats, packed for one backend's kernels."""

    num_heads: int
    num_outputs: int
    num_inputs: int
    nbytes: int
    packed: Any
