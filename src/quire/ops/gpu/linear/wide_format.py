"""Weights as the kernel of grouped_wide.py takes them: integers in groups, in whole spans of 128 or 256 inputs."""

from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops.gpu.linear.grouped_layout import HIGH_WORDS, GroupedWeight

HIGH_BITS = {dtype: bits for bits, dtype in HIGH_WORDS.items()}


class WideFormat(NamedTuple):
    """How scales are stored, and how values are scaled."""

    kind: str  # "halves": fp16 in words; "six", "bytes": of K-quants; "floats": one number a group; "exponents": bytes
    second: str  # what a group has beside its scale: "none", "points", "offsets"
    group: int  # inputs
    parts: int  # chunks of a span
    zero: int  # subtracted from all values
    offset_scales: int  # scales that are added to an offset, since more than the weight's zero is subtracted


def wide_format(weight: GroupedWeight) -> WideFormat | None:
    """For grouped_wide.py. None: it does not know the weight's values or scales, or its inputs are not whole spans."""
    form = slab_format(weight)
    if form is None or form.kind == "exponents" or weight.num_inputs % weight.chunk:
        return None
    parts = 1 if weight.bits == 8 and weight.num_chunks % 2 else form.parts
    return None if weight.num_chunks % parts else form._replace(parts=parts)


def slab_format(weight: GroupedWeight) -> WideFormat | None:
    """For moe/quantized_tiles.py: inputs are whole slabs of 64, in any number of chunks, and values may be MXFP4's."""
    if weight.num_inputs % 64 or weight.num_inputs < 256 or weight.width not in (16, 32) or weight.chunk < 128:
        return None
    parts = 2 if weight.width == 16 or weight.bits == 8 else 1
    if weight.codebook:
        return WideFormat("exponents", "none", weight.group, parts, 0, 0) if weight.has_exponents else None
    second = "points" if weight.has_zero_points else "offsets" if weight.has_offsets else "none"
    if weight.scales.is_floating_point():
        kind = "floats"
    elif weight.super_scales is None:
        kind = "halves"
        if weight.width == 16 and weight.group > weight.chunk:
            return None  # a word would be of several chunks
    else:
        kind = "six" if weight.scales.dtype == torch.int32 else "bytes"
    zero = _middle(weight, kind) if second == "offsets" else weight.zero
    return WideFormat(kind, second, weight.group, parts, zero, zero - weight.zero)


def is_plain_int8(weight: GroupedWeight) -> bool:
    """8 bits with one fp16 scale a chunk, which wide_int8.py multiplies."""
    one_scale = weight.group == weight.chunk and weight.width == 32 and weight.scales.dtype == torch.float16
    return weight.bits == 8 and one_scale and not weight.has_offsets


def _middle(weight: GroupedWeight, kind: str) -> int:
    """Of a weight's values: to subtract it makes offsets small."""
    if weight.bits == 8:
        return 0
    if weight.high is not None:
        return 8 << high_bits(weight)
    return 2 if kind == "bytes" else 8  # Q2_K's values are 0 .. 3


def high_bits(weight: GroupedWeight) -> int:
    return 0 if weight.high is None else HIGH_BITS[weight.high.dtype]


def scale_words(weight: GroupedWeight) -> Tensor:
    """Scales, as kernels in Gluon load them."""
    return weight.scales if weight.scales.is_floating_point() else weight.scales.view(torch.int32)
