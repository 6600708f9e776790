"""Values of a few bits packed into 32-bit words: lowest bits first, and across the ends of words."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed_words(count: int, bits: int) -> int:
    """32-bit words that `count` values take."""
    return -(-count * bits // 32)


def unpack(words: NDArray[Any], bits: int, count: int) -> NDArray[np.uint8]:
    """32-bit words [rows, words] -> values [rows, count]."""
    in_bytes = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits == 0:
        out = np.empty((*in_bytes.shape, 8 // bits), np.uint8)
        for index in range(8 // bits):
            np.right_shift(in_bytes, index * bits, out=out[..., index])
        if bits < 8:
            out &= (1 << bits) - 1
        return out.reshape(len(words), -1)[:, :count]
    each_bit = np.unpackbits(in_bytes, axis=1, bitorder="little")[:, : count * bits].reshape(len(words), count, bits)
    return np.packbits(each_bit, axis=2, bitorder="little").reshape(len(words), count)
