"""Integers of a few bits in groups of inputs, as GPTQ, AWQ, HQQ and compressed-tensors have them.

    w = scale * (q - zero)        q 0 .. 2^bits - 1, a scale and a zero point for each group of inputs of an output

    bits     becomes
    2, 3     4 bits: q - zero, -8 .. 7
    4        4 bits; zero points unless all are 8
    5 to 8   8 bits; offsets unless all zero points are 2^(bits - 1)

With act-order, the inputs of a group are not neighbours. The columns of the weight are then sorted by group, and the
matmul takes its inputs in that order. Where the group size is not a multiple of 32, the weights become fp32."""

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StoredTensor
from quire.weights.blocks import Floats, QuantizedRows, fits_blocks, int4_blocks, int8_blocks
from quire.weights.formats.derived_tensor import plain_floats
from quire.weights.raw import RawTensors

InputGroups = NDArray[np.intp]  # [inputs] the group of each input


def grouped_integers(
    name: str,
    shape: tuple[int, int],
    bits: int,
    quantized: QuantizedRows,
    scales: Floats,
    zeros: Floats,
    groups: InputGroups | None = None,
) -> StoredTensor:
    """`quantized(first, last)` gives rows of q as uint8 [rows, inputs]; scales and zeros are [outputs, groups]."""
    outputs, inputs = shape
    size = inputs // scales.shape[1]
    neighbours = np.arange(inputs) // size
    groups = neighbours if groups is None else groups
    order = None
    if not np.array_equal(groups, neighbours):
        order = np.argsort(groups, kind="stable").astype(np.int32)
    if not fits_blocks(inputs, size) or (order is not None and not np.array_equal(groups[order], neighbours)):
        return plain_floats(name, scales[:, groups] * (quantized(0, outputs).astype(np.float32) - zeros[:, groups]))

    def in_order(first: int, last: int) -> NDArray[np.uint8]:
        rows = quantized(first, last)
        return rows if order is None else rows[:, order]

    def less_zero(first: int, last: int) -> NDArray[np.uint8]:
        by_group = in_order(first, last).reshape(last - first, -1, size) + eights[first:last, :, None]
        return by_group.reshape(last - first, inputs)

    half = 1 << (bits - 1)
    if bits == 4:
        return int4_blocks(name, shape, in_order, scales, zeros, order)
    if bits < 4:
        eights = (8 - zeros).astype(np.uint8)
        return int4_blocks(name, shape, less_zero, scales, np.full_like(zeros, 8), order)
    return int8_blocks(
        name,
        shape,
        lambda first, last: (in_order(first, last) - np.uint8(half)).view(np.int8),
        scales,
        zeros - half,
        order,
    )


def groups_of_inputs(raw: RawTensors, name: str, inputs: int, num_groups: int) -> InputGroups | None:
    """From the tensor `name`. None where it is missing or holds -1: the inputs of a group are neighbours."""
    if name not in raw:
        return None
    raw.expect_shape(name, inputs)
    groups: InputGroups = raw.integers(name).astype(np.intp)
    if np.all(groups == -1):
        return None
    if groups.min() < 0 or groups.max() >= num_groups:
        raise raw.bad(name, f"names groups {groups.min()} to {groups.max()}, and there are {num_groups}")
    return groups
