"""Codes and scales, wherever a format keeps them, become rows of blocks that the op sets pack.

A block is 32 neighbouring weights of a row with their scale, so a scale that stands for 128 weights, or for a whole
row, is written several times. Blocks live only from when a tensor is read until it is packed. They are made some rows
at a time, on a few threads: what is unpacked on the way stays small. Values are exact; where scales are fp16 numbers,
the blocks say so and take less memory when packed."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import FP8, Q4_0, Q4_F, Q4_Z, Q8_0, Q8_F, Q8_M, StorageType, StoredTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Codes = Callable[[int, int], NDArray[Any]]  # rows first .. last -> their codes, [rows, columns] of 8 bits

BLOCK = 32
CHUNK_WEIGHTS = 1 << 19  # unpacked at once, on one thread
MAX_THREADS = 8


def fits_blocks(columns: int, group: int) -> bool:
    """Whether no block of a row would have two scales."""
    return columns % BLOCK == 0 and group % BLOCK == 0


def four_bits(
    name: str,
    shape: tuple[int, int],
    codes: Codes,
    scales: Floats,
    zeros: Floats,
    order: NDArray[np.int32] | None = None,
) -> StoredTensor:
    """w = scale * (code - zero), codes 0 .. 15; scales and zeros [rows, groups]. Columns come in `order`."""
    if not _are_halves(scales):
        return _tensor(name, shape, Q4_F, [scales, -scales * zeros], codes, _nibbles, order)
    halves = scales.astype(np.float16)
    if np.all(zeros == 8):
        return _tensor(name, shape, Q4_0, [halves], codes, _nibbles, order)
    return _tensor(name, shape, Q4_Z, [halves, zeros.astype(np.float16)], codes, _nibbles, order)


def eight_bits(
    name: str,
    shape: tuple[int, int],
    codes: Codes,
    scales: Floats,
    zeros: Floats | None = None,
    order: NDArray[np.int32] | None = None,
) -> StoredTensor:
    """The same with codes -128 .. 127. No zeros: they are 0."""
    if zeros is not None and np.any(zeros):
        return _tensor(name, shape, Q8_M, [scales, -scales * zeros], codes, _as_they_are, order)
    if _are_halves(scales):
        return _tensor(name, shape, Q8_0, [scales.astype(np.float16)], codes, _as_they_are, order)
    return _tensor(name, shape, Q8_F, [scales], codes, _as_they_are, order)


def float_eights(name: str, shape: tuple[int, int], codes: Codes, scales: Floats) -> StoredTensor:
    """w = scale * e4m3."""
    return _tensor(name, shape, FP8, [scales], codes, _as_they_are, None)


def table_places(name: str, shape: tuple[int, int], kind: StorageType, codes: Codes, scales: Floats) -> StoredTensor:
    """w = scale * table[code], the table being that of the type."""
    return _tensor(name, shape, kind, [scales], codes, _nibbles, None)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _are_halves(scales: Floats) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scales.astype(np.float16).astype(np.float32), scales))


def _as_they_are(codes: NDArray[Any]) -> Bytes:
    return codes.view(np.uint8)


def _nibbles(codes: NDArray[Any]) -> Bytes:
    """[rows, blocks, 32] -> [rows, blocks, 16]: the first 16 in the low halves of bytes, the others in the high
    ones."""
    out: Bytes = np.left_shift(codes[..., 16:], 4, dtype=np.uint8)
    out |= codes[..., :16]
    return out


def _tensor(
    name: str,
    shape: tuple[int, int],
    kind: StorageType,
    fields: list[NDArray[Any]],
    codes: Codes,
    stored: Callable[[NDArray[Any]], Bytes],
    order: NDArray[np.int32] | None,
) -> StoredTensor:
    rows, columns = shape
    blocks = columns // BLOCK
    data = np.empty((rows, blocks, kind.block_bytes), np.uint8)
    at = 0
    for field in fields:  # [rows, groups]
        groups, size = field.shape[1], field.itemsize
        by_group = data.reshape(rows, groups, blocks // groups, kind.block_bytes)
        by_group[..., at : at + size] = np.ascontiguousarray(field).view(np.uint8).reshape(rows, groups, 1, size)
        at += size

    def fill(first: int) -> None:
        last = min(first + step, rows)
        data[first:last, :, at:] = stored(codes(first, last).reshape(last - first, blocks, BLOCK))

    step = max(BLOCK, CHUNK_WEIGHTS // columns // BLOCK * BLOCK)
    with ThreadPoolExecutor(min(_num_cpus(), MAX_THREADS)) as pool:
        list(pool.map(fill, range(0, rows, step)))
    return StoredTensor(name, shape, kind, data.reshape(rows, -1), column_order=order)
