"""Importance matrices as llama.cpp keeps them: a GGUF file with NAME.in_sum2 and NAME.counts for each matrix."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from quire.core.errors import BadCheckpoint
from quire.quantize.floats import read_floats
from quire.quantize.gguf_files import encoded, gguf_layout, planned
from quire.quantize.gguf_source import GGUFTensor
from quire.quantize.plan import Importance
from quire.weights.gguf.container import GGUFFile
from quire.weights.gguf.tensors import read_directory, stored_tensor

SUMS, COUNTS = ".in_sum2", ".counts"
KIND = "imatrix"


def read_imatrix(path: Path, tensors: Sequence[GGUFTensor]) -> Importance:
    """`tensors`: of the model, whose names in GGUF the file has."""
    gguf = GGUFFile(path)
    if gguf.metadata.get("general.type") != KIND:
        raise BadCheckpoint(
            f"{path} is no importance matrix: general.type is {gguf.metadata.get('general.type')!r}",
            "older ones, of another format, can be converted with `llama-imatrix`",
        )
    directory = read_directory(gguf)
    sums, counts = {}, {}
    for tensor in tensors:
        entry, counted = directory.get(tensor.name + SUMS), directory.get(tensor.name + COUNTS)
        if entry is None or counted is None:
            continue
        experts = len(tensor.published)
        rows = read_floats(stored_tensor(gguf, entry)).reshape(-1, entry.shape[-1])
        numbers = read_floats(stored_tensor(gguf, counted)).reshape(-1)
        if rows.shape != (experts, tensor.shape[-1]) or len(numbers) not in (1, experts):
            raise BadCheckpoint(
                f"{path}: {entry.name} is {[*entry.shape]}, and the model's {tensor.name} is {[*tensor.shape]}",
                "the file belongs to another model",
            )
        for index, name in enumerate(tensor.published):
            sums[name], counts[name] = rows[index], int(numbers[min(index, len(numbers) - 1)])
    if not sums:
        raise BadCheckpoint(f"{path} has no matrix of this model", "the file belongs to another model")
    return Importance(sums, counts, path.name)


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
