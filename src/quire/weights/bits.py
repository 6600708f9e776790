"""Codes of a few bits, packed into words one behind the other: the lowest bits of a word first, and across words."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def num_words(count: int, bits: int) -> int:
    """Of 32 bits, that `count` codes take."""
    return -(-count * bits // 32)


def unpack(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """Words of 32 bits [rows, words] -> codes [rows, count]."""
    in_bytes = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits == 0:
        out = np.empty((*in_bytes.shape, 8 // bits), np.uint8)
        for place in range(8 // bits):
            np.right_shift(in_bytes, place * bits, out=out[..., place])
        if bits < 8:
            out &= (1 << bits) - 1
        return out.reshape(len(words), -1)[:, :count]
    each_bit = np.unpackbits(in_bytes, axis=1, bitorder="little")[:, : count * bits].reshape(len(words), count, bits)
    return np.packbits(each_bit, axis=2, bitorder="little").reshape(len(words), count)
