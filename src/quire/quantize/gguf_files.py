"""The layout of a GGUF file: keys with their types, the tensor directory, and where each tensor lies."""

import struct
from array import array
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from quire.ops.tensors import GGUF_TYPES
from quire.quantize.output import FileLayout, PlannedTensor
from quire.weights.gguf.container import ARRAY, BOOL, MAGIC, SCALARS, STRING, Cursor, GGUFFile, read_key
from quire.weights.gguf.tensors import TYPE_NAMES

VERSION, ALIGNMENT = 3, 32
TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
UINT16, UINT32, INT32, FLOAT32 = 2, 4, 5, 6
ARRAY_TYPES = {code: number for number, code in SCALARS.items()}


def planned(name: str, type_name: str, shape: Sequence[int]) -> PlannedTensor:
    kind = GGUF_TYPES[type_name]
    assert shape[-1] % kind.block == 0, f"{name} {shape} in {type_name}"
    return PlannedTensor(name, type_name, tuple(shape), prod(shape) // kind.block * kind.block_bytes)


def gguf_layout(name: str, keys: Mapping[str, bytes], tensors: Sequence[PlannedTensor]) -> FileLayout:
    """`keys`: each with its type and value, as `encoded` or `stored_keys` give them."""
    directory, places, offset = bytearray(), {}, 0
    for tensor in tensors:
        dimensions = tensor.shape[::-1]
        directory += _string(tensor.name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        directory += struct.pack("<IQ", TYPE_NUMBERS[tensor.type], offset)
        places[tensor.name] = (offset, tensor.nbytes)
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    header = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(keys))
    header += b"".join(_string(key) + value for key, value in keys.items()) + directory
    header += bytes(-len(header) % ALIGNMENT)
    moved = {key: (len(header) + first, size) for key, (first, size) in places.items()}
    return FileLayout(name, header, moved, len(header) + offset)


def cut_by_bytes(tensors: Sequence[PlannedTensor], max_bytes: int | None) -> list[list[PlannedTensor]]:
    """Tensors of at most `max_bytes` for each file."""
    splits: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if max_bytes is not None and splits[-1] and size + tensor.nbytes > max_bytes:
            splits.append([])
            size = 0
        splits[-1].append(tensor)
        size += tensor.nbytes
    return splits


def gguf_layouts(name: str, keys: Mapping[str, bytes], splits: Sequence[Sequence[PlannedTensor]]) -> list[FileLayout]:
    """One file, or splits named and numbered as llama.cpp does: the first has all keys."""
    if len(splits) == 1:
        return [gguf_layout(name, keys, splits[0])]
    layouts, total = [], sum(map(len, splits))
    for index, split in enumerate(splits):
        numbers = {
            "split.no": struct.pack("<IH", UINT16, index),
            "split.count": struct.pack("<IH", UINT16, len(splits)),
            "split.tensors.count": struct.pack("<Ii", INT32, total),
        }
        file = f"{name.removesuffix('.gguf')}-{index + 1:05}-of-{len(splits):05}.gguf"
        layouts.append(gguf_layout(file, numbers if index else {**keys, **numbers}, split))
    return layouts


def encoded(value: Any) -> bytes:
    """A value with its type: whole numbers are of 32 bits (unsigned, unless below zero), others fp32."""
    if isinstance(value, bool):
        return struct.pack("<IB", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<Ii", INT32, value) if value < 0 else struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, array):
        return struct.pack("<IIQ", ARRAY, ARRAY_TYPES[value.typecode], len(value)) + value.tobytes()
    assert isinstance(value, list), f"{value!r} is no value of GGUF"
    if value and isinstance(value[0], bool):
        return struct.pack("<IIQ", ARRAY, BOOL, len(value)) + bytes(value)
    return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))


def stored_keys(gguf: GGUFFile) -> dict[str, bytes]:
    """The keys of a file, with types and values as they are there."""
    cursor, keys = Cursor(gguf.file, 24), {}
    metadata: dict[str, Any] = {}
    for index, key in enumerate(gguf.metadata):
        begin = cursor.offset + 8 + len(key.encode())
        read_key(cursor, index, metadata, with_strings=False)
        keys[key] = bytes(gguf.file.buffer[begin : cursor.offset])
    return keys


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
