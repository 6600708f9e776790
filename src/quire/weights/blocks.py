"""Quantized values and scales of any format -> rows of blocks, which the op sets pack.

A block is 32 neighbouring weights of a row with their scale, so a scale of 128 weights, or of a whole row, is written
several times. Blocks live only from when a tensor is read until it is packed. They are built some rows at a time, on a
few threads, so that little is unpacked at once. Values are exact; where fp16 holds all scales, the block type says so
and takes less memory when packed."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import FP8, Q4_0, Q4_F, Q4_Z, Q8_0, Q8_F, Q8_M, StorageType, StoredTensor

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
QuantizedRows = Callable[[int, int], NDArray[Any]]  # rows first .. last -> q [rows, columns], 8 bits each

BLOCK_SIZE = 32
CHUNK_WEIGHTS = 1 << 19  # unpacked at once, on one thread
MAX_THREADS = 8


def fits_blocks(columns: int, group: int) -> bool:
    """Whether every block has one scale."""
    return columns % BLOCK_SIZE == 0 and group % BLOCK_SIZE == 0


def int4_blocks(
    name: str,
    shape: tuple[int, int],
    quantized: QuantizedRows,
    scales: Floats,
    zeros: Floats,
    order: NDArray[np.int32] | None = None,
) -> StoredTensor:
    """w = scale * (q - zero), q 0 .. 15; scales and zeros [rows, groups]. Columns come in `order`."""
    if not _fit_fp16(scales):
        return _blocks(name, shape, Q4_F, [scales, -scales * zeros], quantized, _packed_nibbles, order)
    fp16_scales = scales.astype(np.float16)
    if np.all(zeros == 8):
        return _blocks(name, shape, Q4_0, [fp16_scales], quantized, _packed_nibbles, order)
    return _blocks(name, shape, Q4_Z, [fp16_scales, zeros.astype(np.float16)], quantized, _packed_nibbles, order)


def int8_blocks(
    name: str,
    shape: tuple[int, int],
    quantized: QuantizedRows,
    scales: Floats,
    zeros: Floats | None = None,
    order: NDArray[np.int32] | None = None,
) -> StoredTensor:
    """w = scale * (q - zero), q -128 .. 127. Without `zeros`, they are 0."""
    if zeros is not None and np.any(zeros):
        return _blocks(name, shape, Q8_M, [scales, -scales * zeros], quantized, _as_bytes, order)
    if _fit_fp16(scales):
        return _blocks(name, shape, Q8_0, [scales.astype(np.float16)], quantized, _as_bytes, order)
    return _blocks(name, shape, Q8_F, [scales], quantized, _as_bytes, order)


def fp8_blocks(name: str, shape: tuple[int, int], quantized: QuantizedRows, scales: Floats) -> StoredTensor:
    """w = scale * q, q e4m3."""
    return _blocks(name, shape, FP8, [scales], quantized, _as_bytes, None)


def codebook_blocks(
    name: str, shape: tuple[int, int], kind: StorageType, quantized: QuantizedRows, scales: Floats
) -> StoredTensor:
    """w = scale * codebook[q], with the codebook of the type."""
    return _blocks(name, shape, kind, [scales], quantized, _packed_nibbles, None)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fit_fp16(scales: Floats) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(scales.astype(np.float16).astype(np.float32), scales))


def _as_bytes(values: NDArray[Any]) -> Bytes:
    return values.view(np.uint8)


def _packed_nibbles(values: NDArray[Any]) -> Bytes:
    """[rows, blocks, 32] -> [rows, blocks, 16]: the first 16 in the low nibbles, the others in the high nibbles."""
    out: Bytes = np.left_shift(values[..., 16:], 4, dtype=np.uint8)
    out |= values[..., :16]
    return out


def _blocks(
    name: str,
    shape: tuple[int, int],
    kind: StorageType,
    fields: list[NDArray[Any]],
    quantized: QuantizedRows,
    stored: Callable[[NDArray[Any]], Bytes],  # quantized values of blocks -> their bytes
    order: NDArray[np.int32] | None,
) -> StoredTensor:
    rows, columns = shape
    blocks = columns // BLOCK_SIZE
    data = np.empty((rows, blocks, kind.block_bytes), np.uint8)
    offset = 0  # in a block
    for field in fields:  # [rows, groups]
        groups, size = field.shape[1], field.itemsize
        by_group = data.reshape(rows, groups, blocks // groups, kind.block_bytes)
        by_group[..., offset : offset + size] = (
            np.ascontiguousarray(field).view(np.uint8).reshape(rows, groups, 1, size)
        )
        offset += size

    def fill(first: int) -> None:
        last = min(first + step, rows)
        data[first:last, :, offset:] = stored(quantized(first, last).reshape(last - first, blocks, BLOCK_SIZE))

    step = max(BLOCK_SIZE, CHUNK_WEIGHTS // columns // BLOCK_SIZE * BLOCK_SIZE)
    with ThreadPoolExecutor(min(_num_cpus(), MAX_THREADS)) as pool:
        list(pool.map(fill, range(0, rows, step)))
    return StoredTensor(name, shape, kind, data.reshape(rows, -1), column_order=order)
