"""Weights -> blocks of GGUF's i-quants: the inverse of ops/dequantize_grids.py.

A block is 256 weights in groups with a scale each. Vectors of 4 or 8 magnitudes become the nearest entry of a grid, and
signs are kept apart; where a type stores seven signs of eight, their number is made even by flipping the sign that
costs least. Encoders are as in gguf_types.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from quire.ops.dequantize_grids import GRIDS, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES, grid
from quire.quantize.search import Floats, inverse, nearest_in_grid, rounded, to_fp16

Bytes = NDArray[np.uint8]

# What the largest magnitude of a group becomes, over the largest of the grid: more than 1 clips it.
REACHES = np.array([0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75], np.float32)


@dataclass(frozen=True, slots=True)
class GridType:
    """`unit`: what the scales of a block may be, times its super-scale; `group`: weights that share a scale."""

    name: str
    values: Floats
    group: int
    unit: Floats
    even_signs: bool

    @property
    def digits(self) -> int:
        return GRIDS[self.name][1]


_LEVELS = np.arange(16, dtype=np.float32)
_IQ2_UNIT = (_LEVELS + np.float32(0.5)) * np.float32(0.25)
IQ2_XXS = GridType("IQ2_XXS", IQ2_VALUES, 32, _IQ2_UNIT, even_signs=True)
IQ2_XS = GridType("IQ2_XS", IQ2_VALUES, 16, _IQ2_UNIT, even_signs=True)
IQ2_S = GridType("IQ2_S", IQ2_VALUES, 16, _IQ2_UNIT, even_signs=False)
IQ3_XXS = GridType("IQ3_XXS", IQ3_XXS_VALUES, 32, (_LEVELS + np.float32(0.5)) * np.float32(0.5), even_signs=True)
IQ3_S = GridType("IQ3_S", IQ3_S_VALUES, 32, 2 * _LEVELS + 1, even_signs=False)


@dataclass(frozen=True, slots=True, eq=False)
class GridBlocks:
    """super-scales fp16 [n, 1], indices of scales [n, groups], entries [n, vectors], signs [n, 32 bytes]"""

    d: NDArray[np.float16]
    scales: NDArray[np.uint8]
    entries: NDArray[np.int32]
    signs: Bytes


@cache
def grid_halves(name: str) -> NDArray[np.uint8]:
    base, digits = GRIDS[name]
    powers = base ** np.arange(digits // 2)
    parts = grid(name).reshape(-1, 2, digits // 2)
    numbers: NDArray[np.uint8] = (parts * powers).sum(2).astype(np.uint8)
    return numbers


def _nearest(x: Floats, weights: Floats, kind: GridType) -> tuple[NDArray[np.int32], Floats]:
    """Magnitudes in units of the grid [groups, size] -> entries, and the magnitudes they stand for."""
    entries = nearest_in_grid(
        x.reshape(-1, kind.digits), weights.reshape(-1, kind.digits), kind.values, grid_halves(kind.name)
    )
    return entries, kind.values[grid(kind.name)[entries]].reshape(x.shape)


def grid_blocks(x: Floats, weights: Floats, kind: GridType) -> GridBlocks:
    """x and weights [n, 256]"""
    negative = _signs(x, weights, kind.even_signs)
    m, w = (part.reshape(-1, kind.group) for part in (np.where(negative, -x, x), weights))
    scales = _searched(m, w, kind).reshape(len(x), -1)
    d = scales.max(1, keepdims=True) / kind.unit[-1]
    step = kind.unit[1] - kind.unit[0]
    indices = rounded((scales * inverse(d) - kind.unit[0]) / step, 0, 15).astype(np.uint8)
    units = kind.unit[indices].reshape(-1, 1)
    each = np.repeat(d, 256 // kind.group, axis=1).reshape(-1, 1) * units
    entries, values = _nearest(m * inverse(each), w, kind)
    values = (values * units).reshape(x.shape)
    weighted = weights * m.reshape(x.shape)
    refitted = (weighted * values).sum(1, keepdims=True) * inverse((weights * values * values).sum(1, keepdims=True))
    stored = to_fp16(np.where(d > 0, refitted, np.float32(0)))
    signs = np.packbits(negative, axis=1, bitorder="little")
    return GridBlocks(stored, indices, entries.reshape(len(x), -1), signs)


def _signs(x: Floats, weights: Floats, even: bool) -> NDArray[np.bool_]:
    negative: NDArray[np.bool_] = x < 0
    if not even:
        return negative
    eights = negative.reshape(-1, 8)
    odd = np.flatnonzero(np.count_nonzero(eights, axis=1) & 1)
    costs = (weights * x * x).reshape(-1, 8)[odd]
    eights[odd, costs.argmin(1)] ^= True
    return eights.reshape(x.shape)


def _searched(m: Floats, weights: Floats, kind: GridType) -> Floats:
    """The scales of groups: several reaches are tried, each refitted by weighted least squares."""
    over = inverse(m.max(1, keepdims=True))
    weighted = weights * m
    best, scales = np.full(len(m), -1, np.float32), np.zeros(len(m), np.float32)
    for reach in REACHES:
        _, values = _nearest(m * (reach * kind.values[-1] * over), weights, kind)
        product = np.einsum("ij,ij->i", weighted, values)
        scale = product * inverse(np.einsum("ij,ij->i", weights, values * values))
        gain = product * scale
        scales, best = np.where(gain > best, scale, scales), np.maximum(gain, best)
    return np.maximum(scales, 0)


# -- bytes -------------------------------------------------------------------------------------------------------------


def _bytes(values: NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _nibble_pairs(values: NDArray[np.uint8]) -> Bytes:
    return np.asarray(values[:, ::2] | values[:, 1::2] << 4, np.uint8)


def _sign_words(blocks: GridBlocks) -> NDArray[np.uint32]:
    """[n, 8]: of every 32 weights, four times seven signs, and above them the scale."""
    sevens = (blocks.signs & 127).astype(np.uint32).reshape(-1, 8, 4) << np.array([0, 7, 14, 21], np.uint32)
    words: NDArray[np.uint32] = sevens.sum(2, dtype=np.uint32) | blocks.scales.astype(np.uint32) << np.uint32(28)
    return words


def _iq2_xxs(blocks: GridBlocks) -> Bytes:
    entries = _bytes(blocks.entries.astype(np.uint8)).view(np.uint32)
    words = np.stack((entries, _sign_words(blocks)), 2).reshape(len(entries), -1)
    return np.concatenate((_bytes(blocks.d), _bytes(words)), 1)


def _iq2_xs(blocks: GridBlocks) -> Bytes:
    words = blocks.entries.astype(np.uint16) | (blocks.signs & 127).astype(np.uint16) << np.uint16(9)
    return np.concatenate((_bytes(blocks.d), _bytes(words), _nibble_pairs(blocks.scales)), 1)


def _iq2_s(blocks: GridBlocks) -> Bytes:
    high = (blocks.entries >> 8).astype(np.uint8).reshape(len(blocks.d), 8, 4) << np.array([0, 2, 4, 6], np.uint8)
    parts = (
        _bytes(blocks.d),
        blocks.entries.astype(np.uint8),
        blocks.signs,
        np.bitwise_or.reduce(high, axis=2),
        _nibble_pairs(blocks.scales),
    )
    return np.concatenate(parts, 1)


def _iq3_xxs(blocks: GridBlocks) -> Bytes:
    return np.concatenate((_bytes(blocks.d), blocks.entries.astype(np.uint8), _bytes(_sign_words(blocks))), 1)


def _iq3_s(blocks: GridBlocks) -> Bytes:
    parts = (
        _bytes(blocks.d),
        blocks.entries.astype(np.uint8),
        np.packbits((blocks.entries >> 8).astype(np.uint8), axis=1, bitorder="little"),
        blocks.signs,
        _nibble_pairs(blocks.scales),
    )
    return np.concatenate(parts, 1)


GRID_TYPES: dict[str, tuple[GridType, Callable[[GridBlocks], Bytes]]] = {
    "IQ2_XXS": (IQ2_XXS, _iq2_xxs),
    "IQ2_XS": (IQ2_XS, _iq2_xs),
    "IQ2_S": (IQ2_S, _iq2_s),
    "IQ3_XXS": (IQ3_XXS, _iq3_xxs),
    "IQ3_S": (IQ3_S, _iq3_s),
}
