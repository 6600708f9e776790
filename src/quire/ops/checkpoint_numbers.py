"""Checkpoints of states in bf16 and in int8, as bytes: how fp32 numbers become smaller, and what they become again."""

import numpy as np
from numpy.typing import NDArray

from quire.ops.kv_spec import CHECKPOINT_GROUP

Bytes = NDArray[np.uint8]
CHUNK = 1 << 16  # numbers at a time: what is in between stays in the CPU's cache
INT8_MAX = 127


def write_checkpoint(state: NDArray[np.float32], target: Bytes, dtype: str) -> None:
    """`state` [numbers] -> `target`, `StateSpec.checkpoint_bytes` of them."""
    if dtype == "bfloat16":
        halves = target.view(np.uint16)
        for first in range(0, state.size, CHUNK):
            halves[first : first + CHUNK] = _bfloat16(state[first : first + CHUNK])
        return
    quants, scales = _int8_parts(target)
    for first in range(0, len(scales), CHUNK // CHECKPOINT_GROUP):
        part = slice(first, first + CHUNK // CHECKPOINT_GROUP)
        numbers = state[first * CHECKPOINT_GROUP : part.stop * CHECKPOINT_GROUP]
        padded = np.pad(numbers, (0, -numbers.size % CHECKPOINT_GROUP))
        quants[part], scales[part] = _int8(padded.reshape(-1, CHECKPOINT_GROUP))


def read_checkpoint(source: Bytes, state: NDArray[np.float32], dtype: str) -> None:
    """The numbers of a checkpoint, in fp32, into `state`."""
    if dtype == "bfloat16":
        np.left_shift(source.view(np.uint16), 16, out=state.view(np.uint32), dtype=np.uint32)
        return
    quants, scales = _int8_parts(source)
    for first in range(0, len(scales), CHUNK // CHECKPOINT_GROUP):
        part = slice(first, first + CHUNK // CHECKPOINT_GROUP)
        numbers = (quants[part] * scales[part, None]).ravel()
        target = state[first * CHECKPOINT_GROUP : part.stop * CHECKPOINT_GROUP]
        target[:] = numbers[: target.size]


def _bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The upper halves, rounded to even. A NaN stays one."""
    bits = numbers.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), np.uint32(0x7FC0), rounded)


def _int8(groups: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """[groups, numbers] -> integers, scales"""
    largest = np.maximum(groups.max(axis=1), -groups.min(axis=1))
    finite = np.isfinite(largest)
    scales = np.where(finite, largest / np.float32(INT8_MAX), np.float32(np.nan))
    inverse = np.divide(INT8_MAX, largest, out=np.zeros_like(largest), where=finite & (largest > 1e-30))
    if not finite.all():
        groups = np.where(finite[:, None], groups, 0)
    return np.rint(groups * inverse[:, None]).astype(np.int8), scales


def _int8_parts(data: Bytes) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Views: integers [groups, numbers of a group], and scales [groups] behind them."""
    num_groups = data.size // (CHECKPOINT_GROUP + 4)
    quants, scales = np.split(data, [num_groups * CHECKPOINT_GROUP])
    return quants.view(np.int8).reshape(num_groups, CHECKPOINT_GROUP), scales.view(np.float32)
