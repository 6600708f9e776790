"""Integers of a few bits in groups of inputs, and the tensors that GPTQ, AWQ and compressed-tensors store of them.

    w = scale * (q - zero)        q 0 .. 2^bits - 1

Scales are fp16 numbers, so that every reader multiplies with the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.quantize.search import (
    Floats,
    inverse,
    largest_magnitude,
    nonzero_fp16,
    offset_scales,
    rounded,
    shrunk_scales,
)
from quire.quantize.threads import CHUNK_WEIGHTS, in_threads

# Of the range of a group, tried where the importance of inputs is known.
SHRINKS = np.linspace(1.0, 0.6, 21).astype(np.float32)


@dataclass(frozen=True, slots=True)
class IntegerGrid:
    """`group`: inputs that share a scale; 0: all of a row. `min_zero`: the least zero point that the format can say."""

    bits: int
    group: int
    symmetric: bool
    min_zero: int = 0

    @property
    def levels(self) -> int:
        return (1 << self.bits) - 1

    def group_of(self, inputs: int) -> int:
        return self.group or inputs


@dataclass(frozen=True, slots=True, eq=False)
class GroupedIntegers:
    """q [outputs, inputs] of 0 .. 2^bits - 1; scales and zeros [outputs, groups]; groups [inputs] with act-order."""

    bits: int
    q: NDArray[np.uint8]
    scales: NDArray[np.float16]
    zeros: NDArray[np.uint8]
    groups: NDArray[np.int32] | None = None

    def values(self) -> Floats:
        inputs = self.q.shape[1]
        groups = np.arange(inputs) // (inputs // self.scales.shape[1]) if self.groups is None else self.groups
        scales, zeros = self.scales.astype(np.float32)[:, groups], self.zeros.astype(np.float32)[:, groups]
        return scales * (self.q.astype(np.float32) - zeros)

    def packed_inputs(self) -> NDArray[np.int32]:
        """[outputs, words of inputs]"""
        return packed(self.q, self.bits)

    def packed_outputs(self, order: Sequence[int]) -> NDArray[np.int32]:
        """[inputs, words of 8 outputs], those of a word in another order"""
        return _packed_outputs(self.q, order)

    def signed(self) -> NDArray[np.int8]:
        """q - 2^(bits - 1), the zero point of symmetric grids"""
        return (self.q - np.uint8(1 << (self.bits - 1))).view(np.int8)


def ranges(x: Floats, grid: IntegerGrid, weights: Floats | None) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Scales and zero points [groups, 1] of weights [groups, size]. With `weights`, how much each error counts, the
    range that loses least is searched."""
    half = (grid.levels + 1) // 2
    if grid.symmetric:
        most = np.abs(largest_magnitude(x))
        plain = most * np.float32(2 / grid.levels)
        if weights is None:
            return nonzero_fp16(plain), np.full(plain.shape, half, np.uint8)
        scales = shrunk_scales(x, weights, plain, np.full_like(plain, half), grid.levels, SHRINKS)
        return scales, np.full(plain.shape, half, np.uint8)
    low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    if weights is not None:
        scale, offset = offset_scales(x, weights, grid.levels)
        best = np.maximum(scale, 1e-12)
        zero = rounded(-offset * inverse(best), grid.min_zero, grid.levels)
        return shrunk_scales(x, weights, best, zero, grid.levels, SHRINKS[:9]), zero.astype(np.uint8)
    scales = nonzero_fp16((high - low) / np.float32(grid.levels))
    zeros = rounded(-low * inverse(scales.astype(np.float32)), grid.min_zero, grid.levels)
    return scales, zeros.astype(np.uint8)


def to_nearest(w: Floats, grid: IntegerGrid, importance: Floats | None) -> GroupedIntegers:
    """`importance` [inputs]"""
    step = max(CHUNK_WEIGHTS // w.shape[1], 1)
    counted = None
    if importance is not None:
        counted = importance / max(float(importance.mean()), 1e-30) + np.float32(1e-6)
    chunks = [w[first : first + step] for first in range(0, len(w), step)]
    parts = in_threads(lambda rows: _rows_to_nearest(rows, grid, counted), chunks)
    q, scales, zeros = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return GroupedIntegers(grid.bits, q, scales, zeros)


def _rows_to_nearest(
    w: Floats, grid: IntegerGrid, importance: Floats | None
) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.uint8]]:
    size = grid.group_of(w.shape[1])
    x = w.reshape(-1, size)
    weights = None if importance is None else np.broadcast_to(importance, w.shape).reshape(-1, size)
    scales, zeros = ranges(x, grid, weights)
    q = rounded(x * inverse(scales.astype(np.float32)) + zeros.astype(np.float32), 0, grid.levels)
    return q.astype(np.uint8).reshape(w.shape), scales.reshape(len(w), -1), zeros.reshape(len(w), -1)


def packed(values: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """[n, count] -> 32-bit words [n, words], the lowest bits first: the inverse of weights/bits.py."""
    values = np.ascontiguousarray(values, np.uint8)
    if 8 % bits == 0:
        each = 8 // bits
        if missing := -values.shape[1] % (32 // bits):
            values = np.pad(values, ((0, 0), (0, missing)))
        in_bytes = values[:, ::each].copy()
        for place in range(1, each):
            in_bytes |= values[:, place::each] << np.uint8(place * bits)
        return in_bytes.view(np.int32)
    stream = np.unpackbits(values[..., None], axis=2, bitorder="little")[..., :bits].reshape(len(values), -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    return np.packbits(stream, axis=1, bitorder="little").view(np.int32)


# -- what formats store ------------------------------------------------------------------------------------------------


def gptq_tensors(integers: GroupedIntegers, *, second_version: bool) -> dict[str, NDArray[Any]]:
    inputs = integers.q.shape[1]
    groups = integers.groups
    if groups is None:
        groups = (np.arange(inputs) // (inputs // integers.scales.shape[1])).astype(np.int32)
    zeros = np.ascontiguousarray(integers.zeros.T)
    return {
        "qweight": np.ascontiguousarray(integers.packed_inputs().T),
        "qzeros": packed(zeros if second_version else zeros - np.uint8(1), integers.bits),
        "scales": np.ascontiguousarray(integers.scales.T),
        "g_idx": groups,
    }


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of a word


def _packed_outputs(values: NDArray[np.uint8], order: Sequence[int]) -> NDArray[np.int32]:
    by_word = values.T.reshape(values.shape[1], -1, 8)[..., list(order)]
    return packed(by_word.reshape(values.shape[1], -1), 4)


def awq_tensors(integers: GroupedIntegers) -> dict[str, NDArray[Any]]:
    return {
        "qweight": integers.packed_outputs(AWQ_ORDER),
        "qzeros": _packed_outputs(integers.zeros, AWQ_ORDER),
        "scales": np.ascontiguousarray(integers.scales.T),
    }


def packed_tensors(integers: GroupedIntegers, *, symmetric: bool) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        "weight_packed": integers.packed_inputs(),
        "weight_scale": integers.scales,
        "weight_shape": np.array(integers.q.shape, np.int64),
    }
    if not symmetric:
        zeros = packed(np.ascontiguousarray(integers.zeros.T), integers.bits)
        tensors["weight_zero_point"] = np.ascontiguousarray(zeros.T)
    if integers.groups is not None:
        tensors["weight_g_idx"] = integers.groups
    return tensors


def byte_tensors(integers: GroupedIntegers) -> dict[str, NDArray[Any]]:
    return {"weight": integers.signed(), "weight_scale": integers.scales}
