"""Random adapters of a linear layer, and what they add, in fp64."""

import numpy as np

from quire.ops.tensors import BF16, F16, LoraDelta, StoredTensor, stored_floats

RNG = np.random.default_rng(5)


def random(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def low_rank(rank, num_inputs, num_outputs, scale, store=stored_floats):
    return LoraDelta(store("a", random(rank, num_inputs)), store("b", random(num_outputs, rank)), scale)


def fp16_values(name, array):
    return StoredTensor(name, array.shape, F16, array.astype(np.float16).view(np.uint8))


def bfloats(name, array):
    bits = (array.view(np.uint32) >> 16).astype(np.uint16)
    return StoredTensor(name, array.shape, BF16, bits.view(np.uint8))


def added(x, adapters, parts, sizes):
    """x [T, inputs], a slot a row, what is in each slot -> [T, outputs]"""
    from quire.ops.dequantize import dequantize

    out = np.zeros((len(x), sum(sizes)))
    firsts = np.cumsum([0, *sizes])
    for row, slot in enumerate(adapters):
        for first, size, part in zip(firsts, sizes, parts[slot] if slot >= 0 else (), strict=False):
            if part is not None:
                a, b = (dequantize(t).reshape(t.shape).astype(np.float64) for t in (part.a, part.b))
                out[row, first : first + size] = part.scale * (b @ (a @ x[row]))
    return out
