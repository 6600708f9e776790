"""fp8 (e4m3) weights with a scale for a tensor, an output or a block of 128 x 128."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.quantize.search import Floats
from quire.quantize.threads import CHUNK_WEIGHTS, in_threads

LARGEST = np.float32(448)
BLOCK = 128


def to_e4m3(x: Floats) -> NDArray[np.uint8]:
    """To the nearest, ties to even; larger numbers become the largest."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    magnitude = np.minimum(np.abs(x), LARGEST)
    bits_of = magnitude.view(np.uint32)
    normal = ((bits_of + 0x7FFFF + ((bits_of >> 20) & 1)) >> 20).astype(np.int32) - ((127 - 7) << 3)
    subnormal = np.rint(magnitude * np.float32(512)).astype(np.int32)
    q = np.where(magnitude < np.float32(2**-6), subnormal, normal).astype(np.uint8)
    return q | ((bits >> 24) & 128).astype(np.uint8)


def by_tensor(w: Floats) -> dict[str, NDArray[Any]]:
    return _scaled(w, _largest(w).max(initial=0).reshape(1))


def by_output(w: Floats) -> dict[str, NDArray[Any]]:
    return _scaled(w, _largest(w)[:, None])


def by_block(w: Floats) -> dict[str, NDArray[Any]]:
    outputs, inputs = w.shape
    rows, columns = -(-outputs // BLOCK), -(-inputs // BLOCK)
    padded = np.pad(w, ((0, rows * BLOCK - outputs), (0, columns * BLOCK - inputs)))
    largest = np.abs(padded.reshape(rows, BLOCK, columns, BLOCK)).max((1, 3))
    scales = _scales(largest)
    each = np.repeat(scales, BLOCK, 1)[:, :inputs]
    return {"weight": _divided(w, np.repeat(each, BLOCK, 0)[:outputs]), "weight_scale": scales}


def _largest(w: Floats) -> Floats:
    largest: Floats = np.maximum(w.max(1), -w.min(1))
    return largest


def _scales(largest: Floats) -> Floats:
    return np.where(largest > 0, largest / LARGEST, np.float32(1)).astype(np.float32)


def _scaled(w: Floats, largest: Floats) -> dict[str, NDArray[Any]]:
    scales = _scales(largest)
    return {"weight": _divided(w, np.broadcast_to(scales, w.shape)), "weight_scale": scales}


def _divided(w: Floats, scales: Floats) -> NDArray[np.uint8]:
    """w / scales as e4m3, some rows at a time so that they stay in a core's cache."""
    step = max(CHUNK_WEIGHTS // w.shape[1], 1)
    spans = [slice(first, first + step) for first in range(0, len(w), step)]
    return np.concatenate(in_threads(lambda span: to_e4m3(w[span] / scales[span]), spans))
