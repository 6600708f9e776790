"""How many bytes a stored matrix takes when a backend has packed it."""

from dataclasses import dataclass
from math import gcd
from typing import Protocol

from quire.ops.tensors import BF16, F8_E4M3, F8_E5M2, F16, F32, FP8, StoredTensor
from quire.weights.config import CheckpointConfig

_TILE = 16  # outputs: the CPU's kernels pad the last tile
_FLOATS = (F32, F16, BF16, F8_E4M3, F8_E5M2, FP8)

# Bits a weight with its scales, as native/src/pack.h lays them out.
NATIVE_BITS = {
    "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 16, "F8_E5M2": 16, "FP8": 16,
    "Q4_0": 4.5, "Q4_1": 5, "Q4_K": 4.625, "IQ4_NL": 4.5, "IQ4_XS": 4.3125, "MXFP4": 4.5, "Q5_0": 5.5, "Q5_1": 6,
    "Q8_0": 8.5, "Q5_K": 5.625, "Q6_K": 6.5625, "Q3_K": 3.5625, "Q2_K": 3.125, "TQ1_0": 2.5, "TQ2_0": 2.5,
    "IQ1_S": 3.375, "IQ2_XXS": 3.375, "IQ1_M": 3.625, "IQ2_XS": 3.625, "IQ2_S": 3.625, "IQ3_XXS": 4.375,
    "IQ3_S": 4.375, "NVFP4": 5, "Q4_Z": 5, "Q4_F": 6, "Q8_F": 9, "Q8_M": 10, "NF4": 5, "FP4": 5,
}  # fmt: skip

# Bits of a value, bits of its group's scale and offset, and weights of a group: as formats usually have them, where
# neighbours with one scale are merged (ops/gpu/linear/quantized_weights.py).
_GPU_GROUPED = {
    "Q4_0": (4, 16, 32), "Q4_1": (4, 32, 32), "Q8_0": (8, 16, 32), "Q4_Z": (4, 32, 128), "Q4_F": (4, 64, 64),
    "Q8_F": (8, 32, 128), "Q8_M": (8, 64, 128), "NF4": (4, 32, 64), "FP4": (4, 32, 64), "IQ4_NL": (4, 16, 32),
    "Q5_0": (8, 32, 32), "Q5_1": (8, 64, 32), "IQ4_XS": (4, 32, 32), "MXFP4": (4, 8, 32), "NVFP4": (8, 32, 16),
    "IQ1_S": (4, 32, 32), "IQ1_M": (8, 32, 16), "IQ2_XXS": (4, 32, 32), "IQ2_XS": (8, 32, 16), "IQ2_S": (8, 32, 16),
    "IQ3_XXS": (4, 32, 32), "IQ3_S": (4, 32, 32), "TQ1_0": (8, 32, 32), "TQ2_0": (8, 32, 32),
}  # fmt: skip
_MERGED = ("Q4_Z", "Q4_F", "Q8_F", "Q8_M", "NF4", "FP4")  # whose groups a checkpoint chooses
_GPU_K_BITS = {"Q2_K": 5.125, "Q3_K": 4.625, "Q4_K": 4.5, "Q5_K": 5.625, "Q6_K": 6.625}
_GPU_FLOAT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# What `--quantization` makes of float matrices: a storage type on a CPU, (bits, bits of a group, group) on a GPU.
NATIVE_QUANTIZED = {"int8": "Q8_0", "int4": "Q4_1", "nf4": "NF4"}
GPU_QUANTIZED = {"int8": (8, 16, 128), "int4": (4, 32, 128), "nf4": (4, 32, 64), "w4a8": (4, 16, 128)}


class PackedFormat(Protocol):
    """How a backend keeps weights."""

    @property
    def stacks(self) -> bool:
        """Whether the matrices of all experts, or heads, are one."""

    def packed(self, tensor: StoredTensor, quantization: str | None) -> tuple[str, int]:
        """-> the type that the backend keeps a matrix in, and its bytes. `quantization`: of float matrices."""

    def table(self, tensor: StoredTensor) -> tuple[str, int]:
        """-> the same for an embedding table; 0 bytes where it stays in the file."""


@dataclass(frozen=True, slots=True)
class NativeFormat:
    """The CPU's kernels."""

    @property
    def stacks(self) -> bool:
        return False

    def packed(self, tensor: StoredTensor, quantization: str | None) -> tuple[str, int]:
        name = tensor.type.name
        if quantization is not None and tensor.type in _FLOATS and tensor.num_columns % 32 == 0:
            name = NATIVE_QUANTIZED[quantization]
        rows = -(-tensor.num_rows // _TILE) * _TILE
        return name, int(rows * tensor.num_columns * NATIVE_BITS[name] / 8)

    def table(self, tensor: StoredTensor) -> tuple[str, int]:
        return tensor.type.name, 0


@dataclass(frozen=True, slots=True)
class GpuFormat:
    """The Triton kernels. `group`: weights that share a scale, where a checkpoint says so."""

    dtype: str = "bfloat16"
    group: int | None = None

    @property
    def stacks(self) -> bool:
        return True

    def packed(self, tensor: StoredTensor, quantization: str | None) -> tuple[str, int]:
        name, numbers = tensor.type.name, tensor.num_rows * tensor.num_columns
        if self.dtype == "float32":
            return self._floats(numbers)
        if quantization is not None and tensor.type in _FLOATS and tensor.num_columns % 16 == 0:
            if quantization in ("fp8", "w8a8"):
                return "FP8" if quantization == "fp8" else quantization, numbers + 4 * tensor.num_rows
            bits, fields, group = GPU_QUANTIZED[quantization]
            if quantization == "w4a8" and tensor.num_columns % 32:
                return self._floats(numbers)
            widths = (32,) if quantization == "w4a8" else (16, 32)
            return quantization, _grouped(tensor, bits, fields, gcd(tensor.num_columns, group), widths)
        if name == "FP8":
            return name, numbers + 4 * tensor.num_rows
        if name in _GPU_K_BITS:
            return name, int(numbers * _GPU_K_BITS[name] / 8)
        if name in _GPU_GROUPED and not tensor.dummy:
            bits, fields, group = _GPU_GROUPED[name]
            group = min(self.group or group, 128) if name in _MERGED else group
            return name, _grouped(tensor, bits, fields, gcd(tensor.num_columns, group))
        return self._floats(numbers)

    def table(self, tensor: StoredTensor) -> tuple[str, int]:
        if tensor.type in _FLOATS:
            return self._floats(tensor.num_rows * tensor.num_columns)
        return self.packed(tensor, None)

    def _floats(self, numbers: int) -> tuple[str, int]:
        return self.dtype, numbers * _GPU_FLOAT_BYTES[self.dtype]


def _grouped(tensor: StoredTensor, bits: int, field_bits: int, group: int, widths: tuple[int, ...] = (16, 32)) -> int:
    """Rows are padded to whole chunks of words (ops/gpu/linear/grouped_layout.py)."""
    planes, columns = 32 // bits, tensor.num_columns
    chunks = [planes * width for width in widths if width <= group]
    chunk = min(chunks, key=lambda size: (-columns % size, -size))
    padded = -(-columns // chunk) * chunk
    return tensor.num_rows * (padded * bits + -(-padded // group) * field_bits) // 8


def packing_of(config: CheckpointConfig, *, on_gpu: bool) -> PackedFormat:
    """How the backend packs the weights of a checkpoint."""
    groups = config.section("quantization_config").get("group_size")
    group = groups if isinstance(groups, int) and groups > 0 else None
    return GpuFormat(group=group) if on_gpu else NativeFormat()
