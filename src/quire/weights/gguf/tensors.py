"""The tensor directory of a GGUF file: the offset of each tensor, checked before any tensor is read."""

from dataclasses import dataclass
from itertools import dropwhile, pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint, Unsupported
from quire.ops.tensors import GGUF_TYPES, StorageType, StoredTensor
from quire.weights.gguf.container import MAX_NAME_BYTES, Cursor, GGUFFile

MAX_DIMENSIONS = 4

# GGUF's numbers of storage types. Types that are not in GGUF_TYPES are known by name only.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0",
    39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    name: str  # in the file
    shape: tuple[int, ...]  # slowest axis first, the reverse of how the file lists them
    type: StorageType
    offset: int  # from the beginning of the file

    @property
    def num_rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.block * self.type.block_bytes

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes


def read_directory(gguf: GGUFFile) -> dict[str, TensorEntry]:
    cursor = Cursor(gguf.file, gguf.directory_offset)
    entries: dict[str, TensorEntry] = {}
    for index in range(gguf.num_tensors):
        cursor.what = f"tensor {index}"
        entry = _read_entry(cursor, gguf.alignment)
        if entry.name in entries:
            raise cursor.bad("was given before")
        entries[entry.name] = entry
    data_offset = -(-cursor.offset // gguf.alignment) * gguf.alignment
    entries = {name: _absolute(entry, data_offset, gguf) for name, entry in entries.items()}
    _check_overlap(entries, gguf)
    return entries


def stored_tensor(gguf: GGUFFile, entry: TensorEntry) -> StoredTensor:
    """The tensor under the file's name, a view of the mapped file."""
    rows = gguf.file.rows(entry.offset, entry.num_rows, entry.row_bytes)
    return StoredTensor(entry.name, entry.shape, entry.type, rows)


def half_split_order(num_rows: int, num_heads: int) -> NDArray[np.int32] | None:
    """Rows of a head are stored as 0, n/2, 1, n/2 + 1, ...; this order restores 0, 1, 2, ... None: `num_rows` are not
    `num_heads` heads with an even number of rows."""
    if num_heads < 1 or num_rows % (2 * num_heads):
        return None
    return np.arange(num_rows, dtype=np.int32).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _read_entry(cursor: Cursor, alignment: int) -> TensorEntry:
    """One entry of the directory; its offset is from the beginning of the data."""
    name = cursor.string(MAX_NAME_BYTES)
    cursor.what = f"tensor {name!r}"
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.bad(f"has {num_dimensions} dimensions, and 1 to {MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
    if 0 in shape:
        raise cursor.bad(f"has the shape {list(shape)}")
    if len(shape) == MAX_DIMENSIONS:  # outer axes of 1, which other writers leave out
        shape = (*dropwhile((1).__eq__, shape[:-1]), shape[-1])
    number = cursor.scalar("I")
    if number not in TYPE_NAMES:
        raise cursor.bad(f"is of type {number}, which GGUF does not have")
    kind = GGUF_TYPES.get(TYPE_NAMES[number])
    if kind is None:
        raise Unsupported(
            f"{cursor.file.path}: {cursor.what} is stored as {TYPE_NAMES[number]}",
            f"get a file that uses {', '.join(GGUF_TYPES)}",
        )
    if shape[-1] % kind.block:
        raise cursor.bad(f"has rows of {shape[-1]} weights, and {kind.name} stores blocks of {kind.block}")
    offset = cursor.scalar("Q")
    if offset % alignment:
        raise cursor.bad(f"has its data at {offset}, which is not a multiple of {alignment}")
    return TensorEntry(name, shape, kind, offset)


def _absolute(entry: TensorEntry, data_offset: int, gguf: GGUFFile) -> TensorEntry:
    """The entry with its offset from the beginning of the file, checked to end inside the file."""
    offset = data_offset + entry.offset
    if offset + entry.nbytes > gguf.file.size:
        raise BadCheckpoint(
            f"{gguf.path}: tensor {entry.name!r} at offset {offset} needs {entry.nbytes} bytes, "
            f"and the file ends at {gguf.file.size}",
            "download the file again",
        )
    return TensorEntry(entry.name, entry.shape, entry.type, offset)


def _check_overlap(entries: dict[str, TensorEntry], gguf: GGUFFile) -> None:
    in_order = sorted(entries.values(), key=lambda entry: entry.offset)
    for before, after in pairwise(in_order):
        if before.offset + before.nbytes > after.offset:
            raise BadCheckpoint(
                f"{gguf.path}: tensor {after.name!r} at offset {after.offset} begins inside tensor {before.name!r}, "
                f"which ends at {before.offset + before.nbytes}",
                "download the file again",
            )
