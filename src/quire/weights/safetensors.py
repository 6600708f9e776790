"""One safetensors file: u64 header length · JSON header · tensor data. Mapped, and checked before use."""

import json
from collections import Counter
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from quire.core.errors import BadCheckpoint
from quire.weights.mapped_file import MappedFile
from quire.weights.raw import RawEntry

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSIONS, MAX_COUNT = 8, 1 << 63  # of a shape, and of a number in it

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "C64": 64, "U64": 64, "I64": 64,
    "F64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = MappedFile(path)
        header, self._data_offset = self._read_header()
        entries = [(name, self._entry(name, fields)) for name, fields in header.items() if name != "__metadata__"]
        self.entries = dict(sorted(entries, key=lambda item: (item[1].offset, item[1].nbytes)))
        self._check_overlap()

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """-> the header, and the offset of the data."""
        file = self.file
        if file.size < 8:
            raise BadCheckpoint(f"{self.path} is not a safetensors file: it has {file.size} bytes")
        length = int.from_bytes(file.buffer[:8], "little")
        if length > min(MAX_HEADER_BYTES, file.size - 8):
            raise BadCheckpoint(
                f"{self.path}: the header should have {length} bytes, and {file.size - 8} follow",
                "download the file again",
            )
        try:
            header = json.loads(file.buffer[8 : 8 + length].decode(), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise BadCheckpoint(f"{self.path}: the header at offset 8 is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise BadCheckpoint(f"{self.path}: the header at offset 8 is not a JSON object")
        return header, 8 + length

    def _entry(self, name: str, fields: Any) -> RawEntry:
        def bad(problem: str) -> BadCheckpoint:
            return BadCheckpoint(f"{self.path}: tensor {name!r} {problem}", "download the file again")

        if not isinstance(fields, dict):
            raise bad("is not described by an object")
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str):
            raise bad(f"has the dtype {dtype!r}")
        if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
            raise bad(f"has the shape {_short(shape)}")
        if not _are_counts(offsets) or len(offsets) != 2:
            raise bad(f"has the offsets {_short(offsets)}")
        begin, end = (self._data_offset + offset for offset in offsets)
        if not begin <= end <= self.file.size:
            raise bad(f"is at offset {begin} to {end}, and the file ends at {self.file.size}")
        if (bits := ITEM_BITS.get(dtype)) is not None and prod(shape) * bits != 8 * (end - begin):
            raise bad(
                f"at offset {begin} has {end - begin} bytes, and {dtype} {shape} needs {prod(shape) * bits / 8:g}"
            )
        return RawEntry(dtype, tuple(shape), begin, end - begin)

    def _check_overlap(self) -> None:
        for (before, first), (after, second) in pairwise(self.entries.items()):
            if first.offset + first.nbytes > second.offset:
                raise BadCheckpoint(
                    f"{self.path}: tensor {after!r} at offset {second.offset} begins inside tensor {before!r}, "
                    f"which ends at {first.offset + first.nbytes}",
                    "download the file again",
                )


def _are_counts(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < MAX_COUNT for value in values)


def _short(value: Any) -> str:
    return text if len(text := repr(value)) <= 80 else f"{text[:77]}..."


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{max(counts, key=counts.__getitem__)!r} is given twice")
    return values
