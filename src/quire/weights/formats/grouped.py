"""Integers of a few bits in groups of inputs: what GPTQ, AWQ and compressed-tensors have in common.

    w = scale * (code - zero)        codes 0 .. 2^bits - 1, a scale and a zero for each group of inputs of an output

    bits     becomes
    2, 3     4-bit codes less their zero, -8 .. 7
    4        4-bit codes; zero points unless all are 8
    5 to 8   8-bit codes; offsets unless all zeros are half of the range

With act-order, groups are not of neighbours. Inputs are then put into the order of their groups, and the product takes
its inputs in that order. Where groups are no multiple of 32 inputs, the weights become fp32."""

import numpy as np
from numpy.typing import NDArray

from quire.ops.tensors import StoredTensor
from quire.weights.blocks import Codes, Floats, eight_bits, fits_blocks, four_bits
from quire.weights.formats.derived_tensor import plain_floats
from quire.weights.raw import RawTensors

Inputs = NDArray[np.intp]  # [inputs] the group of each


def grouped_integers(
    name: str,
    shape: tuple[int, int],
    bits: int,
    codes: Codes,
    scales: Floats,
    zeros: Floats,
    groups: Inputs | None = None,
) -> StoredTensor:
    """`codes(first, last)` are those of some rows, uint8 [rows, inputs]; scales and zeros [outputs, groups]."""
    outputs, inputs = shape
    size = inputs // scales.shape[1]
    neighbours = np.arange(inputs) // size
    groups = neighbours if groups is None else groups
    order = None
    if not np.array_equal(groups, neighbours):
        order = np.argsort(groups, kind="stable").astype(np.int32)
    if not fits_blocks(inputs, size) or (order is not None and not np.array_equal(groups[order], neighbours)):
        return plain_floats(name, scales[:, groups] * (codes(0, outputs).astype(np.float32) - zeros[:, groups]))

    def in_order(first: int, last: int) -> NDArray[np.uint8]:
        found = codes(first, last)
        return found if order is None else found[:, order]

    def less_their_zero(first: int, last: int) -> NDArray[np.uint8]:
        by_group = in_order(first, last).reshape(last - first, -1, size) + eights[first:last, :, None]
        return by_group.reshape(last - first, inputs)

    half = 1 << (bits - 1)
    if bits == 4:
        return four_bits(name, shape, in_order, scales, zeros, order)
    if bits < 4:
        eights = (8 - zeros).astype(np.uint8)
        return four_bits(name, shape, less_their_zero, scales, np.full_like(zeros, 8), order)
    return eight_bits(
        name,
        shape,
        lambda first, last: (in_order(first, last) - np.uint8(half)).view(np.int8),
        scales,
        zeros - half,
        order,
    )


def groups_of_inputs(raw: RawTensors, name: str, inputs: int, num_groups: int) -> Inputs | None:
    """From a tensor that lists them. There may be none, or one that holds -1: they are neighbours."""
    if name not in raw:
        return None
    raw.expect_shape(name, inputs)
    found: Inputs = raw.integers(name).astype(np.intp)
    if np.all(found == -1):
        return None
    if found.min() < 0 or found.max() >= num_groups:
        raise raw.bad(name, f"names groups {found.min()} to {found.max()}, and there are {num_groups}")
    return found
