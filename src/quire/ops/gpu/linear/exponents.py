"""Scales of MXFP4, powers of two, in a byte each: the exponent of a float, where `EXPONENT` stands for a scale of one,
and 0 for a scale of 0.

Memory is [chunks, N, groups of a chunk], so kernels load a word of four scales. A value of E2M1 times 2^-127 (e2m1.py),
times the bf16 that has the byte as its exponent, is the weight times 2^-64: exact from `LEAST_EXPONENT` on. Scales of
less than 2^-69, or more than 2^64, have no byte, and then all scales of a matrix stay floats."""

import torch
from torch import Tensor

EXPONENT = 190
LEAST_EXPONENT = 121
ONE = 127  # the exponent of an fp32 of one
OF_BITS = 2.0 ** (ONE - EXPONENT)  # times the fp32 whose exponent is the byte: the scale


def exponents_of(scales: Tensor) -> Tensor | None:
    """Scales -> uint8 of the same shape; None where one of them is no power of two, or out of range."""
    bits = scales.float().view(torch.int32)
    exponents = (bits >> 23) + (EXPONENT - ONE)
    powers = (bits & 0x7FFFFF == 0) & (exponents >= LEAST_EXPONENT) & (exponents < 255)
    if not bool((powers | (bits == 0)).all()):
        return None
    return torch.where(bits == 0, 0, exponents).to(torch.uint8)


def scales_of(exponents: Tensor) -> Tensor:
    """The inverse, in fp32."""
    return (exponents.int() << 23).view(torch.float32) * OF_BITS


def by_chunk(exponents: Tensor, num_chunks: int, groups: int) -> Tensor:
    """[N, groups of all inputs] -> [num_chunks, N, groups of a chunk], zeros past the last input"""
    padded = torch.nn.functional.pad(exponents, (0, num_chunks * groups - exponents.shape[1]))
    return padded.unflatten(1, (num_chunks, groups)).transpose(0, 1).contiguous()


def by_group(exponents: Tensor) -> Tensor:
    """[chunks, N, groups of a chunk] -> scales [G, N] in fp32"""
    return scales_of(exponents).transpose(1, 2).flatten(0, 1).contiguous()
