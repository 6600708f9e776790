"""Importance matrices as llama.cpp keeps them: a GGUF file with NAME.in_sum2 and NAME.counts for each matrix.

Older ones are read too (imatrix.dat): how many entries, then for each its name, its count of chunks and its sums."""

import struct
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.quantize.floats import read_floats
from quire.quantize.gguf_files import encoded, gguf_layout, planned
from quire.quantize.gguf_source import GGUFTensor
from quire.quantize.plan import Importance
from quire.weights.gguf.container import MAGIC, GGUFFile
from quire.weights.gguf.tensors import read_directory, stored_tensor

Entries = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]  # sums and counts by the name of a matrix
SUMS, COUNTS = ".in_sum2", ".counts"
KIND = "imatrix"


def read_imatrix(path: Path, tensors: Sequence[GGUFTensor]) -> Importance:
    """`tensors`: of the model, whose names in GGUF the file has."""
    with path.open("rb") as file:
        is_older = file.read(len(MAGIC)) != MAGIC
    entries = _older_entries(path) if is_older else _entries(path)
    sums, counts = {}, {}
    for tensor in tensors:
        if tensor.name not in entries:
            continue
        rows, numbers = entries[tensor.name]
        experts = len(tensor.published)
        if rows.size != experts * tensor.shape[-1] or len(numbers) not in (1, experts):
            raise BadCheckpoint(
                f"{path}: {tensor.name} has sums of {rows.size} inputs, and is {[*tensor.shape]} in the model",
                "the file belongs to another model",
            )
        for index, name in enumerate(tensor.published):
            sums[name] = rows.reshape(experts, -1)[index]
            counts[name] = int(numbers[min(index, len(numbers) - 1)])
    if not sums:
        raise BadCheckpoint(f"{path} has no matrix of this model", "the file belongs to another model")
    return Importance(sums, counts, path.name)


def _entries(path: Path) -> Entries:
    gguf = GGUFFile(path)
    if gguf.metadata.get("general.type") != KIND:
        raise BadCheckpoint(
            f"{path} is no importance matrix: general.type is {gguf.metadata.get('general.type')!r}",
            "`quire quantize MODEL --calibrate TEXT --save-imatrix FILE` makes one",
        )
    directory = read_directory(gguf)
    entries = {}
    for name in (key.removesuffix(SUMS) for key in directory if key.endswith(SUMS)):
        if (counted := directory.get(name + COUNTS)) is not None:
            sums = read_floats(stored_tensor(gguf, directory[name + SUMS]))
            entries[name] = (sums, read_floats(stored_tensor(gguf, counted)).reshape(-1))
    return entries


def _older_entries(path: Path) -> Entries:
    data, offset, entries = path.read_bytes(), 0, {}

    def number() -> int:
        nonlocal offset
        value: int = struct.unpack_from("<i", data, offset)[0]
        offset += 4
        if value < 0:
            raise ValueError(f"a count is {value}")
        return value

    def taken(size: int) -> bytes:
        nonlocal offset
        if offset + size > len(data):
            raise ValueError(f"it ends at {len(data)} bytes, within an entry")
        offset += size
        return data[offset - size : offset]

    try:
        for _ in range(number()):
            name = taken(number()).decode()
            chunks, size = number(), number()
            sums = np.frombuffer(taken(4 * size), "<f4")
            if not np.isfinite(sums).all():
                raise ValueError(f"{name} has sums that are not numbers")
            entries[name] = (sums, np.array([chunks], np.float32))
    except (struct.error, ValueError) as error:
        raise BadCheckpoint(
            f"{path} is no importance matrix, neither a GGUF file nor an older imatrix.dat: {error}",
            "`quire quantize MODEL --calibrate TEXT --save-imatrix FILE` makes one",
        ) from error
    return entries


def write_imatrix(path: Path, importance: Importance, tensors: Sequence[GGUFTensor], num_chunks: int, size: int) -> int:
    """-> the number of matrices."""
    known = [tensor for tensor in tensors if all(name in importance.sums for name in tensor.published)]
    known = [tensor for tensor in known if tensor.published and len(tensor.shape) > 1]
    keys = {
        "general.type": encoded(KIND),
        "imatrix.datasets": encoded([importance.source]),
        "imatrix.chunk_count": encoded(num_chunks),
        "imatrix.chunk_size": encoded(size),
    }
    plans, data = [], {}
    for tensor in known:
        sums = np.stack([importance.sums[name] for name in tensor.published]).astype(np.float32)
        counts = np.array([[importance.counts[name]] for name in tensor.published], np.float32)
        for suffix, values in ((SUMS, sums), (COUNTS, counts)):
            plans.append(planned(tensor.name + suffix, "F32", values.shape))
            data[tensor.name + suffix] = values
    layout = gguf_layout(path.name, keys, plans)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(layout.header)
        for name, (offset, _) in layout.places.items():
            file.seek(offset)
            file.write(array("B", data[name].tobytes()))
        file.truncate(layout.size)
    partial.replace(path)
    return len(known)
